// Times bundles against ONNX Runtime Web, one thread each, in turns, in one process of Node:
//   node turns.mjs FOLDER ORT [NAME ...]
// FOLDER is what prepare.py wrote, ORT the folder of the npm package onnxruntime-web. A turn is about 0.1 s of one
// candidate; the figure is the median of a candidate's turns, each the mean of its calls. Arrays of a call are the
// caller's, in and out, for both.
import fs from "node:fs";
import path from "node:path";
import { pathToFileURL } from "node:url";

const [folder, ortFolder, ...only] = process.argv.slice(2);
const TURN_MS = 100;
const WARM_TURNS = 5;
const TURNS = Number(process.env.TURNS ?? 12);
const ort = await import(pathToFileURL(path.resolve(ortFolder, "dist/ort.wasm.min.mjs")));
ort.env.wasm.numThreads = 1;
ort.env.wasm.wasmPaths = pathToFileURL(path.resolve(ortFolder, "dist")) + "/";

const KINDS = { float32: Float32Array, float64: Float64Array, int64: BigInt64Array, bool: Uint8Array };

function readCase(name) {
  const { arrays, forms, targets } = JSON.parse(fs.readFileSync(path.join(folder, name, "case.json")));
  const of = (prefix) =>
    Object.fromEntries(
      Object.entries(arrays)
        .filter(([key]) => key.startsWith(prefix))
        .map(([key, { dtype, dims }]) => {
          const bytes = new Uint8Array(fs.readFileSync(path.join(folder, name, `${key}.bin`)));
          return [key.slice(prefix.length), { data: new KINDS[dtype](bytes.buffer), dims, dtype }];
        }),
    );
  return { inputs: of("in_"), expected: of("out_"), forms, targets };
}

async function ours(name, target, inputs) {
  const { load } = await import(pathToFileURL(path.resolve(folder, name, target, "attention.js")));
  const attention = await load();
  const own = Object.fromEntries(attention.inputs.map((info) => [info.name, inputs[info.name]]));
  return async () => Object.values(attention.run(own)).map(({ data }) => data);
}

async function theirs(name, form, inputs) {
  const model = new Uint8Array(fs.readFileSync(path.join(folder, name, `${form}.onnx`)));
  const session = await ort.InferenceSession.create(model, { executionProviders: ["wasm"], graphOptimizationLevel: "all" });
  const names = session.inputNames.filter((one) => one in inputs);
  const feeds = Object.fromEntries(
    names.map((one) => [one, new ort.Tensor(inputs[one].dtype, inputs[one].data, inputs[one].dims)]),
  );
  return async () => {
    const outputs = await session.run(feeds);
    return session.outputNames.map((one) => outputs[one].data);
  };
}

// The largest error of a call, as a share of the largest output.
function error(outputs, expected) {
  let worst = 0, largest = 0; // prettier-ignore
  Object.values(expected).forEach(({ data }, i) => {
    data.forEach((value, j) => {
      worst = Math.max(worst, Math.abs(value - outputs[i][j]));
      largest = Math.max(largest, Math.abs(value));
    });
  });
  return worst / largest;
}

async function turn(call) {
  const begin = performance.now();
  let calls = 0;
  do {
    await call();
    calls += 1;
  } while (performance.now() - begin < TURN_MS);
  return (performance.now() - begin) / calls;
}

const median = (values) => values.sort((a, b) => a - b)[values.length >> 1];

for (const name of only.length ? only : fs.readdirSync(folder).sort()) {
  if (!fs.existsSync(path.join(folder, name, "case.json"))) {
    console.log(`${name}: not in ${folder}`);
    continue;
  }
  const { inputs, expected, forms, targets } = readCase(name);
  const candidates = {};
  for (const target of targets) candidates[target] = await ours(name, target, inputs);
  for (const form of forms) {
    try {
      candidates[`ort ${form}`] = await theirs(name, form, inputs);
    } catch (problem) {
      console.log(`${name} ort ${form}: ${String(problem.message).slice(0, 120)}`);
    }
  }
  const errors = {};
  for (const [label, call] of Object.entries(candidates)) {
    errors[label] = error(await call(), expected);
    for (let i = 0; i < WARM_TURNS; ++i) await turn(call); // until the engine has compiled it for speed
  }
  const times = Object.fromEntries(Object.keys(candidates).map((label) => [label, []]));
  for (let i = 0; i < TURNS; ++i) {
    for (const [label, call] of Object.entries(candidates)) times[label].push(await turn(call));
  }
  const ms = Object.fromEntries(Object.entries(times).map(([label, values]) => [label, median(values)]));
  const best = Math.min(...forms.map((form) => ms[`ort ${form}`] ?? Infinity));
  const row = Object.entries(ms).map(([label, value]) => `${label} ${value.toFixed(3)} ms (error ${errors[label].toExponential(1)})`);
  const ratios = targets.map((target) => `${target} ${(best / ms[target]).toFixed(2)}`);
  console.log(`${name}: ORT's best by ours: ${ratios.join(", ")}; ${row.join("; ")}`);
}
process.exit(0);
