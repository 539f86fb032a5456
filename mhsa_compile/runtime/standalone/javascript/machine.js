// Runs the program that a compiled file carries: what TVM's virtual machine does elsewhere.
//
// Arrays lie in the file's own memory. A register holds an array, a place in memory (storage), a shape (a list of
// numbers), a number, a text or a list of values. Memory goes back when no register holds anything in it.

import { ARRAYS, product } from "./tensors.js";

const CALL = 1, RETURN = 2, GOTO = 3, IF = 4; // prettier-ignore
const REGISTER = 0, IMMEDIATE = 1, CONSTANT = 2; // prettier-ignore
const INT = 1, FLOAT = 3, ARRAY = 7; // tvm_ffi's numbers of types; prettier-ignore
const ANY_BYTES = 16, TENSOR_BYTES = 40, CPU = 1, MOST_RANK = 8; // prettier-ignore
const SLOT_BYTES = ANY_BYTES + TENSOR_BYTES + 8 * MOST_RANK;
const MOST_ARGUMENTS = 256;
const CODES = { int: 0, uint: 1, float: 2, bfloat: 4, bool: 6 };
const SECTION = "mhsa.program";
const BIND = "bind_weights_";

export class Machine {
  static async start(module) {
    const [section] = WebAssembly.Module.customSections(module, SECTION);
    if (!section) throw new Error("attention.wasm: expected a file of mhsa bundle, got one without a program");
    const program = JSON.parse(new TextDecoder().decode(section));
    const { exports } = await WebAssembly.instantiate(module, {});
    return new Machine(program, exports);
  }

  constructor(program, exports) {
    this.exports = exports;
    exports._initialize?.();
    this.functions = program.functions.map((one) => ({ ...one, run: this.#native(one) }));
    this.slots = this.#allocate(SLOT_BYTES * (MOST_ARGUMENTS + 1));
    this.constants = program.constants.map((one) => this.#constant(one));
  }

  get memoryBytes() {
    return this.exports.memory.buffer.byteLength;
  }

  // What `main` takes behind its inputs, made of weights by functions of the program, one after the other. What a
  // function has read goes before the next one begins, but for weights that others read too.
  bind(weights) {
    const packed = [];
    for (let number = 0; ; ++number) {
      const bind = this.functions.find((one) => one.name === BIND + number);
      if (!bind) return packed;
      const places = (bind.parameters ?? []).map((name) => Number(name.replace("weight_", "")));
      const values = places.map((place) => this.#fromCaller(weights[place]));
      packed.push(...this.#execute(bind, values));
      for (const value of values) this.#release(value);
    }
  }

  // The outputs of a function as arrays of the caller's.
  run(name, inputs, packed) {
    const values = inputs.map((one) => this.#fromCaller(one));
    try {
      const result = this.#execute(this.functions.find((one) => one.name === name), [...values, ...packed]);
      const outputs = (Array.isArray(result) ? result : [result]).map((one) => this.#toCaller(one));
      this.#release(result);
      return outputs;
    } finally {
      for (const value of values) this.#release(value);
    }
  }

  // What a function returns, held once for whoever called.
  #execute(fn, parameters) {
    const registers = new Array(fn.registers);
    parameters.forEach((value, i) => (registers[i] = this.#hold(value)));
    try {
      for (let at = 0; ; ) {
        const words = fn.code[at];
        if (words[0] === CALL) {
          this.#call(words, registers);
          at += 1;
        } else if (words[0] === RETURN) {
          return this.#hold(registers[words[1]]);
        } else if (words[0] === GOTO) {
          at += words[1];
        } else if (words[0] === IF) {
          at += registers[words[1]] ? 1 : words[2];
        }
      }
    } finally {
      for (const value of registers) this.#release(value);
    }
  }

  #call(words, registers) {
    const fn = this.functions[words[2]];
    const values = [];
    for (let i = 3; i < words.length; i += 2) {
      const kind = words[i], value = words[i + 1]; // prettier-ignore
      if (kind === REGISTER) values.push(value < 0 ? undefined : registers[value]);
      else if (kind === IMMEDIATE) values.push(value);
      else if (kind === CONSTANT) values.push(this.constants[value]);
      else throw new Error(`attention.wasm: an argument of kind ${kind}`);
    }
    const result = fn.code ? this.#execute(fn, values) : this.#hold(fn.run(...values));
    if (words[1] < 0) {
      this.#release(result);
      return;
    }
    this.#release(registers[words[1]]);
    registers[words[1]] = result;
  }

  // --- functions of compiled code -----------------------------------------------------------------------------------

  #native(fn) {
    if (fn.code) return undefined;
    const builtin = fn.name.startsWith("vm.builtin.") ? this[fn.name.slice("vm.builtin.".length)] : undefined;
    if (builtin) return builtin.bind(this);
    const code = this.exports[`__tvm_ffi_${fn.name}`];
    if (!code) throw new Error(`attention.wasm: a program that calls ${fn.name}, which nothing has`);
    return (...values) => this.#callCode(code, values);
  }

  // A slot is an argument as tvm_ffi writes it (TVMFFIAny): a number, or an array's address (DLTensor), then that array
  // and its dims. Arguments lie side by side, what they point to behind them.
  #callCode(code, values) {
    const view = new DataView(this.exports.memory.buffer);
    const result = this.slots, first = result + ANY_BYTES; // prettier-ignore
    let place = first + ANY_BYTES * values.length;
    values.forEach((value, i) => {
      const at = first + ANY_BYTES * i;
      if (typeof value === "number") {
        view.setInt32(at, INT, true);
        view.setBigInt64(at + 8, BigInt(value), true);
      } else if (value instanceof Real) {
        view.setInt32(at, FLOAT, true);
        view.setFloat64(at + 8, value.value, true);
      } else {
        view.setInt32(at, ARRAY, true);
        view.setBigInt64(at + 8, BigInt(place), true);
        place = this.#writeTensor(view, place, value);
      }
    });
    view.setInt32(result, 0, true);
    if (code(0, first, values.length, result) !== 0) throw new Error(this.#lastError());
    const after = new DataView(this.exports.memory.buffer);
    return after.getInt32(result, true) === INT ? Number(after.getBigInt64(result + 8, true)) : undefined;
  }

  // A DLTensor of 32-bit addresses, then its dims. Returns the place behind them.
  #writeTensor(view, at, tensor) {
    const [, name, bits] = /^([a-z]+)(\d*)$/.exec(tensor.dtype);
    const dims = at + TENSOR_BYTES;
    view.setUint32(at, tensor.address, true);
    view.setInt32(at + 4, CPU, true);
    view.setInt32(at + 8, 0, true);
    view.setInt32(at + 12, tensor.dims.length, true);
    view.setUint8(at + 16, CODES[name]);
    view.setUint8(at + 17, bits ? Number(bits) : 8);
    view.setUint16(at + 18, 1, true);
    view.setUint32(at + 20, dims, true);
    view.setUint32(at + 24, 0, true);
    view.setBigUint64(at + 32, 0n, true);
    tensor.dims.forEach((dim, i) => view.setBigInt64(dims + 8 * i, BigInt(dim), true));
    return dims + 8 * tensor.dims.length;
  }

  #lastError() {
    const memory = new Uint8Array(this.exports.memory.buffer, this.exports.mhsa_error());
    return new TextDecoder().decode(memory.slice(0, memory.indexOf(0)));
  }

  // --- memory -------------------------------------------------------------------------------------------------------

  #allocate(bytes) {
    const address = this.exports.mhsa_allocate(bytes);
    if (!address) throw new Error(`memory: expected room for ${bytes} bytes, got none; ${this.memoryBytes} are in use`);
    return address;
  }

  #storage(bytes) {
    return new Storage(this.#allocate(bytes));
  }

  // Counts one more holder of what a value lies in, and returns the value.
  #hold(value) {
    if (value instanceof Storage) value.holders += 1;
    else if (value instanceof Tensor) value.storage.holders += 1;
    else if (value instanceof Tuple) for (const one of value) this.#hold(one);
    return value;
  }

  #release(value) {
    const storage = value instanceof Tensor ? value.storage : value;
    if (value instanceof Tuple) for (const one of value) this.#release(one);
    else if (storage instanceof Storage && --storage.holders === 0) this.exports.mhsa_free(storage.address);
  }

  #fromCaller({ data, dims, dtype }) {
    const tensor = new Tensor(this.#storage(data.byteLength), 0, dims, dtype);
    const bytes = new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
    new Uint8Array(this.exports.memory.buffer).set(bytes, tensor.address);
    return this.#hold(tensor);
  }

  #toCaller(tensor) {
    return { data: this.#elements(tensor).slice(), dims: tensor.dims, dtype: tensor.dtype };
  }

  #elements(tensor) {
    return new ARRAYS[tensor.dtype](this.exports.memory.buffer, tensor.address, product(tensor.dims));
  }

  #constant(one) {
    if (one.kind === "float") return new Real(one.value ?? 0);
    if (one.kind === "shape") return one.dims ?? [];
    if (one.kind !== "tensor") return one.value ?? 0; // what is 0, or empty, is left out
    const data = Uint8Array.from(atob(one.data), (letter) => letter.charCodeAt(0));
    return this.#fromCaller({ data, dims: one.dims ?? [], dtype: one.value });
  }

  // --- what TVM calls vm.builtin ------------------------------------------------------------------------------------

  alloc_shape_heap(machine, size) {
    return new Tensor(this.#storage(8 * size), 0, [size], "int64");
  }

  alloc_storage(machine, shape, device, dtype) {
    return this.#storage(product(shape) * ARRAYS[dtype].BYTES_PER_ELEMENT);
  }

  alloc_tensor(storage, offset, dims, dtype) {
    return new Tensor(storage, offset, dims, dtype);
  }

  check_tensor_info(tensor, rank, dtype, context) {
    const wrong = !(tensor instanceof Tensor) || (rank !== -1 && tensor.dims.length !== rank);
    if (wrong || (context !== undefined && tensor.dtype !== dtype)) {
      throw new Error(`${context ?? dtype}: expected another array, got ${tensor?.dtype} of ${tensor?.dims}`);
    }
  }

  check_shape_info(shape, rank, context) {
    if (rank !== -1 && shape.length !== rank) throw new Error(`${context}: expected ${rank} sizes, got ${shape}`);
  }

  check_tuple_info(tuple, size, context) {
    if (tuple.length !== size) throw new Error(`${context}: expected ${size} values, got ${tuple.length}`);
  }

  check_prim_value_info(value, dtype, context) {
    if (typeof value !== "number" && !(value instanceof Real)) throw new Error(`${context}: expected a number`);
  }

  // Each size has a code: 0 it is this number, 1 it goes to this place of the heap, 2 nothing, 3 it is what is there.
  match_shape(value, heap, count, ...rest) {
    const dims = value instanceof Tensor ? value.dims : value, context = rest[2 * count]; // prettier-ignore
    if (dims.length !== count) throw new Error(`${context}: expected ${count} sizes, got ${dims}`);
    for (let i = 0; i < count; ++i) this.match_prim_value(dims[i], heap, rest[2 * i], rest[2 * i + 1], context);
  }

  match_prim_value(value, heap, code, place, context) {
    if (code === 1) this.#elements(heap)[place] = BigInt(value);
    const expected = code === 0 ? place : code === 3 ? Number(this.#elements(heap)[place]) : value;
    if (value !== expected) throw new Error(`${context}: expected a size of ${expected}, got ${value}`);
  }

  make_shape(heap, count, ...rest) {
    return Array.from({ length: count }, (_, i) => this.make_prim_value(heap, rest[2 * i], rest[2 * i + 1]));
  }

  make_prim_value(heap, code, place) {
    return code === 0 ? place : Number(this.#elements(heap)[place]);
  }

  null_value() {
    return undefined;
  }

  copy(value) {
    return value;
  }

  make_tuple(...values) {
    return Tuple.from(values);
  }

  tuple_getitem(tuple, place) {
    return tuple[place];
  }

  tuple_reset_item(tuple, place) {
    this.#release(tuple[place]);
    tuple[place] = undefined;
  }

  reshape(tensor, dims) {
    return new Tensor(tensor.storage, tensor.offset, dims, tensor.dtype);
  }

  shape_of(tensor) {
    return tensor.dims;
  }

  tensor_to_shape(tensor) {
    return Array.from(this.#elements(tensor), Number);
  }

  read_if_cond(value) {
    return Number(value instanceof Tensor ? this.#elements(value)[0] : value) !== 0 ? 1 : 0;
  }
}

class Storage {
  holders = 0;

  constructor(address) {
    this.address = address;
  }
}

class Tensor {
  constructor(storage, offset, dims, dtype) {
    Object.assign(this, { storage, offset, dims, dtype });
  }

  get address() {
    return this.storage.address + this.offset;
  }
}

class Tuple extends Array {}

class Real {
  constructor(value) {
    this.value = value;
  }
}
