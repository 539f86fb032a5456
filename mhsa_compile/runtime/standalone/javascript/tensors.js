// Arrays by dtype, and files of them (safetensors).

export const ARRAYS = {
  bool: Uint8Array,
  int8: Int8Array,
  uint8: Uint8Array,
  int16: Int16Array,
  uint16: Uint16Array,
  int32: Int32Array,
  uint32: Uint32Array,
  int64: BigInt64Array,
  uint64: BigUint64Array,
  float16: Uint16Array, // bits: JavaScript has no such numbers everywhere
  bfloat16: Uint16Array,
  float32: Float32Array,
  float64: Float64Array,
};

const SAFETENSORS = {
  BOOL: "bool", I8: "int8", U8: "uint8", I16: "int16", U16: "uint16", I32: "int32", U32: "uint32", I64: "int64",
  U64: "uint64", F16: "float16", BF16: "bfloat16", F32: "float32", F64: "float64",
}; // prettier-ignore

export function product(dims) {
  return dims.reduce((left, right) => left * right, 1);
}

// The tensors of a file by name. Their data are views of the file where they lie at an address that suits them.
export function readTensors(file) {
  const length = Number(new DataView(file).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(file, 8, length)));
  const tensors = {};
  for (const [name, entry] of Object.entries(header)) {
    if (name === "__metadata__") continue;
    const dtype = SAFETENSORS[entry.dtype];
    if (!dtype) throw new Error(`${name}: expected a dtype of ${Object.keys(SAFETENSORS)}, got ${entry.dtype}`);
    const [begin, end] = entry.data_offsets.map((offset) => 8 + length + offset);
    tensors[name] = { data: viewOf(ARRAYS[dtype], file, begin, end), dims: entry.shape };
  }
  return tensors;
}

function viewOf(kind, file, begin, end) {
  const size = kind.BYTES_PER_ELEMENT;
  return begin % size ? new kind(file.slice(begin, end)) : new kind(file, begin, (end - begin) / size);
}
