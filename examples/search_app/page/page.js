// The page: files, searches, results. What a pair's heads attend to is drawn by attention.js.
import { showAttention } from "/attention.js";

const LARGEST_FILE = 1_000_000;
const $ = (id) => document.getElementById(id);

// Asks the server; an error is thrown with the one message that a person reads.
export async function ask(path, options = {}) {
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new Error("The server does not answer. Is it still running?");
  }
  const answer = await response.json().catch(() => ({ message: "The server’s answer makes no sense." }));
  if (!response.ok) throw new Error(answer.message);
  return answer;
}

export const send = (path, body) =>
  ask(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });

const say = (text, busy = false) => {
  $("status").textContent = text;
  $("status").classList.toggle("busy", busy);
};

const complain = (text) => {
  $("message").textContent = text;
  $("message").hidden = !text;
};

// Runs what may fail; its message is shown, and nothing of before stays on the screen as if it were the answer.
async function attempt(doing, action) {
  complain("");
  say(doing, true);
  try {
    say((await action()) ?? "");
  } catch (error) {
    say("");
    complain(error.message);
  }
}

const counted = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;

let lists = 0; // that were shown

function showFiles({ files }) {
  lists += 1;
  $("names").replaceChildren(...files.map(({ name, passages }) => {
    const item = document.createElement("li");
    const [label, size, remove] = ["span", "span", "button"].map((kind) => document.createElement(kind));
    label.className = "name";
    label.textContent = name;
    size.className = "size";
    size.textContent = counted(passages, "passage");
    remove.type = "button";
    remove.textContent = "×";
    remove.setAttribute("aria-label", `Remove ${name}`);
    remove.addEventListener("click", () => attempt(`Removing ${name} …`, async () => {
      showFiles(await ask(`/api/files/${encodeURIComponent(name)}`, { method: "DELETE" }));
      $("results").replaceChildren();
      $("query").focus();
      return `${name} is removed.`;
    }));
    item.append(label, size, remove);
    return item;
  }));
  $("examples").hidden = files.length > 0;
}

// Files one after the other; what is wrong with one keeps none of the others out.
async function addFiles(files) {
  complain("");
  const wrong = [];
  let added = 0;
  for (const file of files) {
    say(`Reading ${file.name} …`, true);
    try {
      if (file.size > LARGEST_FILE) throw new Error(`${file.name} is larger than 1 MB. Split it.`);
      const body = await file.arrayBuffer().catch(() => { throw new Error(`${file.name} cannot be read. Is it a folder?`); });
      showFiles(await ask(`/api/files/${encodeURIComponent(file.name)}`, { method: "PUT", body }));
      added += 1;
    } catch (error) {
      wrong.push(error.message);
    }
  }
  say(added ? `${counted(added, "file")} added.` : "");
  complain(wrong.join(" "));
  if (added) $("query").focus();
}

function resultItem(query, { id, file, text, score }, index) {
  const item = $("result").content.cloneNode(true).querySelector("li");
  const [open, attention] = [item.querySelector(".open"), item.querySelector(".attention")];
  item.querySelector(".number").textContent = score.toFixed(2);
  item.querySelector(".bar span").style.width = `${Math.max(0, Math.min(1, score)) * 100}%`;
  item.querySelector(".text").textContent = text;
  item.querySelector(".file").textContent = file;
  attention.id = `attention-${index}`;
  open.setAttribute("aria-controls", attention.id);
  open.addEventListener("click", async () => {
    const opening = open.getAttribute("aria-expanded") !== "true";
    for (const other of document.querySelectorAll(".open[aria-expanded=true]")) toggle(other, false);
    if (!opening) return;
    complain("");
    try {
      toggle(open, true);
      await showAttention(attention, query, id, send);
    } catch (error) {
      toggle(open, false);
      complain(error.message);
    }
  });
  return item;
}

function toggle(open, expanded) {
  open.setAttribute("aria-expanded", expanded);
  open.querySelector(".more").textContent = expanded ? "Close" : "See attention";
  const attention = $(open.getAttribute("aria-controls"));
  attention.hidden = !expanded;
  if (!expanded) attention.replaceChildren();
}

let searches = 0;

$("search").addEventListener("submit", (event) => {
  event.preventDefault();
  const mine = (searches += 1);
  attempt("Searching …", async () => {
    const began = performance.now();
    $("results").replaceChildren();
    const { query, best, results } = await send("/api/search", { query: $("query").value });
    if (mine !== searches) return "Searching …"; // a later one is under way
    $("results").replaceChildren(...results.map((result, index) => resultItem(query, result, index)));
    return `The nearest ${counted(results.length, "passage")}, in ${Math.round(performance.now() - began)} ms. ${best}`;
  });
});

$("choose").addEventListener("change", async ({ target }) => {
  await addFiles([...target.files]);
  target.value = "";
});

$("examples").addEventListener("click", () => attempt("Reading the example texts …", async () => {
  showFiles(await ask("/api/examples", { method: "POST" }));
  $("query").focus();
  return "Ask, for instance: how do I keep slugs away?";
}));

const holdsFiles = (event) => event.dataTransfer?.types.includes("Files");
addEventListener("dragover", (event) => {
  if (!holdsFiles(event)) return;
  event.preventDefault();
  document.body.classList.add("dropping");
});
addEventListener("dragleave", (event) => {
  if (event.relatedTarget === null) document.body.classList.remove("dropping");
});
addEventListener("drop", (event) => {
  if (!holdsFiles(event)) return;
  event.preventDefault();
  document.body.classList.remove("dropping");
  addFiles([...event.dataTransfer.files]);
});

attempt("", async () => {
  const before = await ask("/api/files");
  if (!lists) showFiles(before); // else what was added meanwhile has brought a newer list
});
