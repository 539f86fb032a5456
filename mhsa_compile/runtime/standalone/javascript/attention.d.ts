/** An array of any number of dims, its elements row by row. */
export interface Tensor<Data = ArrayBufferView> {
  data: Data;
  dims: number[];
  /** Of outputs, by its name in the manifest: float16, bfloat16 and bool lie in arrays of their bits. */
  dtype?: string;
}

export interface LoadOptions {
  /** Where the files of the bundle are; by default where attention.js is. */
  folder?: string | URL;
  /** Other weights than the bundle's: a file of safetensors, or arrays by name. */
  weights?: ArrayBuffer | Record<string, Tensor>;
  /** Whether files are held against the manifest's hashes; needs https: or localhost. By default true. */
  verify?: boolean;
}

/** An input or output, as manifest.json has it. */
export interface TensorInfo {
  name: string;
  dtype: string;
  dims: (number | string)[];
}

export interface Attention {
  readonly inputs: TensorInfo[];
  readonly outputs: TensorInfo[];
  /** Bytes of the code's memory: weights as they are packed, and the most that a call has needed. */
  readonly memoryBytes: number;
  /** One call, in the thread that makes it. Throws an Error that says what was expected. */
  run(inputs: Inputs): Outputs;
}

/** Fetches the files, checks them, and packs the weights. */
export function load(options?: LoadOptions): Promise<Attention>;
