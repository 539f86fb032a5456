// The model, in a thread of its own, so that the page stays awake. Takes {id, text}, answers {id, vector}.

import { load } from "./model/attention.js";
import { Tokenizer } from "./tokenizer.js";

const LONGEST = 256; // pieces that are read of a passage
const begin = performance.now();
const ready = Promise.all([load(), fetch("vocab.txt").then((response) => response.text())]).then(([model, text]) => {
  postMessage({ ready: true, seconds: (performance.now() - begin) / 1000 });
  return { model, tokenizer: new Tokenizer(text) };
});
ready.catch((error) => postMessage({ error: error.message }));

onmessage = async ({ data: { id, text } }) => {
  const { model, tokenizer } = await ready;
  const ids = BigInt64Array.from(tokenizer.encode(text, LONGEST), BigInt);
  const dims = [1, ids.length];
  const [output] = Object.values(model.run({ ids: { data: ids, dims }, valid: { data: ids.map(() => 1n), dims } }));
  postMessage({ id, vector: output.data });
};
