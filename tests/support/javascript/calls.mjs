// Calls a bundle: node calls.mjs FOLDER. Each line of its input names two files, of inputs and for outputs; it answers
// each with a line, "ok" or what the bundle said. Both are safetensors.
import fs from "node:fs";
import path from "node:path";
import readline from "node:readline";
import { pathToFileURL } from "node:url";

const folder = pathToFileURL(path.resolve(process.argv[2]) + path.sep);
const { load } = await import(new URL("attention.js", folder));
const { readTensors } = await import(new URL("tensors.js", folder));
const NAMES = { bool: "BOOL", float16: "F16", bfloat16: "BF16", float32: "F32", float64: "F64", int32: "I32", int64: "I64" };

function written(outputs) {
  const header = {};
  let end = 0;
  for (const [name, { data, dims, dtype }] of Object.entries(outputs)) {
    header[name] = { dtype: NAMES[dtype], shape: dims, data_offsets: [end, (end += data.byteLength)] };
  }
  const text = Buffer.from(JSON.stringify(header));
  const length = Buffer.alloc(8);
  length.writeBigUInt64LE(BigInt(text.length));
  const bytes = Object.values(outputs).map(({ data }) => Buffer.from(data.buffer, data.byteOffset, data.byteLength));
  return Buffer.concat([length, text, ...bytes]);
}

function readBytes(name) {
  const bytes = fs.readFileSync(name);
  return bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength);
}

try {
  const attention = await load();
  console.log(`ready ${attention.memoryBytes}`);
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const [inputs, outputs] = line.split("\t");
    try {
      fs.writeFileSync(outputs, written(attention.run(readTensors(readBytes(inputs)))));
      console.log(`ok ${attention.memoryBytes}`);
    } catch (error) {
      console.log(error.message.replaceAll("\n", " "));
    }
  }
} catch (error) {
  console.log(error.message.replaceAll("\n", " "));
}
