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
  const parts: ArrayBuffer[] = [];
  let offset = 0;
  for (const [name, { shape, data }] of Object.entries(tensors)) {
    const end = offset + data.byteLength;
    const dtype = data instanceof Float32Array ? "F32" : "I32";
    header[name] = { dtype, shape, data_offsets: [offset, end] };
    parts.push(littleEndian(data));
    offset = end;
  }
  const text = new TextEncoder().encode(JSON.stringify(header));
  const padded = new Uint8Array(Math.ceil(text.length / ALIGNED) * ALIGNED).fill(0x20);
  padded.set(text);
  const length = new DataView(new ArrayBuffer(8));
  length.setBigUint64(0, BigInt(padded.length), true);
  return new Blob([length.buffer, padded, ...parts], { type: "application/octet-stream" });
}

function littleEndian(data: Float32Array | Int32Array): ArrayBuffer {
  const view = new DataView(new ArrayBuffer(data.byteLength));
  for (let i = 0; i < data.length; i++)
    if (data instanceof Float32Array) view.setFloat32(4 * i, data[i]!, true);
    else view.setInt32(4 * i, data[i]!, true);
  return view.buffer;
}
