// Loads an attention that mhsa-compile compiled to WebAssembly, and calls it: in browsers and in Node.
//
//   import { load } from "./attention.js";
//   const attention = await load();
//   const { y } = attention.run({ x: { data: new Float32Array(7 * 64), dims: [1, 7, 64] } });
//
// attention.d.ts has the types. Nothing is fetched but the files of this folder.

import { Machine } from "./machine.js";
import { readTensors } from "./tensors.js";
import { checkedInputs } from "./signature.js";

const IN_NODE = typeof process !== "undefined" && process.versions?.node !== undefined;

export async function load({ folder = new URL("./", import.meta.url), weights, verify = true } = {}) {
  const read = (name) => fetchBytes(new URL(name, new URL(folder, import.meta.url)));
  const [manifest, code] = await Promise.all([read("manifest.json"), read("attention.wasm")]);
  const signature = JSON.parse(new TextDecoder().decode(manifest));
  const stored = weights === undefined ? await read("weights.safetensors") : undefined;
  if (verify) {
    await checkHash("attention.wasm", code, signature.files["module.so"]);
    if (stored) await checkHash("weights.safetensors", stored, signature.files["weights.safetensors"]);
  }
  const module = await WebAssembly.compile(code).catch((error) => {
    const features = signature.target.hardware.features.join(" and ");
    throw new Error(`attention.wasm: expected a browser or Node with ${features}, got: ${error.message}`);
  });
  const tensors = weights instanceof ArrayBuffer || stored ? readTensors(stored ?? weights) : weights;
  return new Attention(signature, await Machine.start(module), tensors);
}

class Attention {
  #machine;
  #packed;

  constructor(signature, machine, weights) {
    this.inputs = signature.inputs;
    this.outputs = signature.outputs;
    this.limits = signature.limits ?? {};
    this.#machine = machine;
    this.#packed = machine.bind(checkedInputs(signature.weights, weights, {}, "weight"));
  }

  run(inputs) {
    const values = checkedInputs(this.inputs, inputs, this.limits, "input");
    const results = this.#machine.run("main", values, this.#packed);
    return Object.fromEntries(this.outputs.map((info, i) => [info.name, results[i]]));
  }

  get memoryBytes() {
    return this.#machine.memoryBytes;
  }
}

async function fetchBytes(url) {
  if (url.protocol === "file:" && IN_NODE) {
    const bytes = await (await import("node:fs/promises")).readFile(url);
    return bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength);
  }
  const response = await fetch(url);
  if (!response.ok) throw new Error(`${url}: expected a file of the bundle, got status ${response.status}`);
  return response.arrayBuffer();
}

async function checkHash(name, bytes, expected) {
  const subtle = globalThis.crypto?.subtle ?? (IN_NODE ? (await import("node:crypto")).webcrypto.subtle : undefined);
  if (!subtle) {
    throw new Error(`${name}: browsers check hashes on https: and localhost only; elsewhere load({ verify: false })`);
  }
  const digest = new Uint8Array(await subtle.digest("SHA-256", bytes));
  const actual = Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
  if (actual !== expected) throw new Error(`${name}: expected sha256 ${expected}, got ${actual}; copy the bundle again`);
}
