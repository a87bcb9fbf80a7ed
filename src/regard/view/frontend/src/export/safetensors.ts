/** Numbers as a safetensors file: eight bytes of length, a JSON header, the bytes of the tensors. */

export interface Tensor {
  shape: number[];
  data: Float32Array | Int32Array;
}

const ALIGNED = 8;

export function safetensors(
  tensors: Record<string, Tensor>,
  metadata: Record<string, string>,
): Blob {
  const header: Record<string, unknown> = { __metadata__: metadata };
  const parts: BlobPart[] = [];
  let offset = 0;
  for (const [name, { shape, data }] of Object.entries(tensors)) {
    const end = offset + data.byteLength;
    const dtype = data instanceof Float32Array ? "F32" : "I32";
    header[name] = { dtype, shape, data_offsets: [offset, end] };
    // Little-endian, as the format asks: sources count on machines that are, too.
    parts.push(data.slice());
    offset = end;
  }
  const text = new TextEncoder().encode(JSON.stringify(header));
  const padded = new Uint8Array(Math.ceil(text.length / ALIGNED) * ALIGNED).fill(0x20);
  padded.set(text);
  const length = new DataView(new ArrayBuffer(8));
  length.setBigUint64(0, BigInt(padded.length), true);
  return new Blob([length.buffer, padded, ...parts], { type: "application/octet-stream" });
}
