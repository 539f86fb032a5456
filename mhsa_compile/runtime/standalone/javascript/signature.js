// What a call brings, held against the manifest: names, dtypes, dims.

import { ARRAYS, product } from "./tensors.js";

// The arrays in the order of `infos`, each with its dtype. Throws an Error that says what was expected.
export function checkedInputs(infos, arrays, limits, what) {
  const names = infos.map((info) => info.name);
  const missing = names.filter((name) => !(name in arrays));
  if (missing.length) throw new Error(`${what}s: expected ${names}, got none of ${missing}`);
  const extra = Object.keys(arrays).filter((name) => !names.includes(name));
  if (extra.length) throw new Error(`${what}s: expected ${names}, got also ${extra}`);
  const sizes = {};
  const tensors = infos.map((info) => checkedTensor(info, arrays[info.name], sizes, `${what} ${info.name}`));
  for (const [i, info] of infos.entries()) checkBounds(info, tensors[i], sizes, `${what} ${info.name}`);
  for (const [name, most] of Object.entries(limits)) {
    if (sizes[name] > most) throw new Error(`${what}s: expected ${name} of at most ${most}, got ${sizes[name]}`);
  }
  return tensors;
}

function checkedTensor(info, tensor, sizes, what) {
  const { data, dims } = tensor ?? {};
  const kind = ARRAYS[info.dtype];
  if (!(data instanceof kind)) {
    throw new Error(`${what}: expected { data: ${kind.name}, dims } (${info.dtype}), got ${data?.constructor?.name}`);
  }
  if (!Array.isArray(dims) || product(dims) !== data.length) {
    throw new Error(`${what}: expected dims of ${data.length} elements, got ${dims}`);
  }
  if (dims.length !== info.dims.length) throw new Error(`${what}: expected dims ${info.dims}, got ${dims}`);
  for (const [axis, dim] of info.dims.entries()) {
    const size = dims[axis];
    if (!Number.isSafeInteger(size) || size < 1) throw new Error(`${what}: expected sizes of 1 and more, got ${dims}`);
    const expected = typeof dim === "number" ? dim : (sizes[dim] ??= size);
    if (size !== expected) throw new Error(`${what}: expected ${info.dims} with ${dim} = ${expected}, got ${dims}`);
  }
  return { data, dims, dtype: info.dtype };
}

// What only all sizes together say: what a mask broadcasts to, and numbers that pick rows or count keys.
function checkBounds(info, { data, dims }, sizes, what) {
  for (const [axis, dim] of (info.broadcast ?? []).entries()) {
    const full = typeof dim === "number" ? dim : sizes[dim];
    const shorter = info.pads && axis === dims.length - 1 && dims[axis] < full;
    if (full !== undefined && dims[axis] !== 1 && dims[axis] !== full && !shorter) {
      throw new Error(`${what}: expected 1 or ${dim} = ${full} on axis ${axis}, got ${dims}`);
    }
  }
  const most = typeof info.most === "string" ? sizes[info.most] : info.most;
  if (most !== undefined && most !== null) checkRange(data, 0, most, what);
  if (info.rows) checkRange(data, -info.rows, info.rows - 1, what);
}

function checkRange(data, least, most, what) {
  const wrong = data.find((value) => value < least || value > most);
  if (wrong !== undefined) throw new Error(`${what}: expected numbers from ${least} to ${most}, got ${wrong}`);
}
