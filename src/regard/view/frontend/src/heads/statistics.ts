/** The numbers of heads that views show: what they are called, and how they are written. */

export interface Column {
  name: string;
  title: string;
  about: string;
  share: boolean;
}

export const COLUMNS: Column[] = [
  { name: "entropy", title: "Entropy", about: "How spread rows are, mean in nats", share: false },
  { name: "first", title: "On first", about: "Mean weight on the first token", share: true },
  { name: "self", title: "On self", about: "Mean weight on the token itself", share: true },
  { name: "previous", title: "On previous", about: "Mean weight on the token before", share: true },
  { name: "max_logit", title: "Max logit", about: "The largest score of the head", share: false },
  { name: "empty", title: "Empty", about: "Rows that may see nothing", share: true },
  { name: "broken", title: "Broken", about: "Rows whose logits are not finite", share: true },
];

export type Figures = Record<string, number | undefined>;

/** As many digits in every row, so that columns can be read down. */
export function written(figure: number | undefined, { share }: Column): string {
  if (figure === undefined) return "–";
  return share ? `${(100 * figure).toFixed(1)}%` : figure.toFixed(2);
}

/** Those of which there is a number. */
export function known(rows: { figures: Figures }[]): Column[] {
  return COLUMNS.filter(({ name }) => rows.some(({ figures }) => figures[name] !== undefined));
}

/** The numbers of one head. */
export function figuresOf(found: Record<string, (number | null)[]>, head: number): Figures {
  return Object.fromEntries(
    Object.entries(found).map(([name, all]) => [name, all[head] ?? undefined]),
  );
}
