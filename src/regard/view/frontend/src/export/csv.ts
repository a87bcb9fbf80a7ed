/** A table as text. */

type Field = string | number | boolean | undefined;

const written = (field: Field) =>
  typeof field === "string" ? `"${field.replaceAll('"', '""')}"` : String(field ?? "");

export function csv(header: string[], rows: Iterable<Field[]>): string {
  const lines = [header.join()];
  for (const row of rows) lines.push(row.map(written).join());
  return lines.join("\n") + "\n";
}
