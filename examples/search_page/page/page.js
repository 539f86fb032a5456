// Passages of the text, the vectors that the worker makes of them, and the nearest to a question.

const MOST_LETTERS = 600; // of a passage
const MOST_RESULTS = 8;
const NEAR = 0.25; // the similarity from which on a passage fits: docs/apps.md
const [text, form, query, status, results] = ["text", "search", "query", "status", "results"].map((id) =>
  document.getElementById(id),
);
const button = form.querySelector("button");
const worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
const waiting = new Map();
const vectors = new Map(); // by passage: a text that is searched twice is read once
let calls = 0;

worker.onmessage = ({ data }) => {
  if (data.ready) {
    status.textContent = `The model is here, after ${data.seconds.toFixed(1)} s.`;
    button.disabled = false;
  } else if (data.error) {
    status.textContent = `The model cannot be loaded: ${data.error}`;
  } else {
    waiting.get(data.id)(data.vector);
    waiting.delete(data.id);
  }
};
worker.onerror = (event) => (status.textContent = `The model stopped: ${event.message}`);

function embedded(passage) {
  return new Promise((resolve) => {
    waiting.set(++calls, resolve);
    worker.postMessage({ id: calls, text: passage });
  });
}

// Paragraphs, and of long ones as many sentences as fit.
function passages(all) {
  return all.split(/\n\s*\n/).flatMap((paragraph) => {
    const parts = [];
    for (const sentence of paragraph.trim().split(/(?<=[.!?…]["'”’)\]]*)\s+/)) {
      const joined = parts.length ? `${parts.at(-1)} ${sentence}` : sentence;
      if (parts.length && joined.length <= MOST_LETTERS) parts[parts.length - 1] = joined;
      else if (sentence) parts.push(sentence);
    }
    return parts;
  });
}

async function search() {
  const question = query.value.trim();
  const places = [...new Set(passages(text.value))];
  if (!question || !places.length) {
    status.textContent = question ? "There is no text yet." : "Ask something.";
    return;
  }
  button.disabled = true;
  const begin = performance.now();
  const fresh = places.filter((passage) => !vectors.has(passage));
  for (const [i, passage] of fresh.entries()) {
    status.textContent = `Reading: ${i} of ${fresh.length} passages`;
    vectors.set(passage, await embedded(passage));
  }
  const asked = await embedded(question);
  const cosine = (vector) => vector.reduce((sum, value, i) => sum + value * asked[i], 0);
  const ranked = places.map((passage) => [cosine(vectors.get(passage)), passage]).sort(([a], [b]) => b - a);
  show(ranked.slice(0, MOST_RESULTS));
  const seconds = ((performance.now() - begin) / 1000).toFixed(2);
  const words = ranked[0][0] < NEAR ? "Nothing here fits. " : "";
  status.textContent = `${words}${places.length} passages, ${fresh.length} of them read now: ${seconds} s.`;
  button.disabled = false;
}

function show(ranked) {
  results.replaceChildren(
    ...ranked.map(([score, passage]) => {
      const item = document.createElement("li");
      const number = document.createElement("span");
      number.className = "score";
      number.textContent = ` ${score.toFixed(2)}`;
      item.append(passage, number);
      return item;
    }),
  );
}

form.onsubmit = (event) => {
  event.preventDefault();
  search();
};
document.body.ondragover = (event) => event.preventDefault();
document.body.ondrop = async (event) => {
  event.preventDefault();
  for (const file of event.dataTransfer.files) text.value += `${text.value && "\n\n"}${await file.text()}`;
};
