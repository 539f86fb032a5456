// What each head attends to, for a query and a passage that the model reads as one text.

const DRAWN = 0.02; // weights below draw no line
const NAMED = 3; // tokens that the sentence below names

// Fills `place` for a pair; rejects with what the server said.
export async function showAttention(place, query, passage, send) {
  const view = new View(place, (layer) => send("/api/attention", { query, passage, layer }));
  await view.chooseLayer(); // whichever the server thinks of first
}

class View {
  constructor(place, load) {
    this.place = place;
    this.load = load;
    this.asked = 0;
    this.held = null; // the token that was clicked
  }

  async chooseLayer(layer) {
    const asked = (this.asked += 1);
    const answer = await this.load(layer);
    if (asked !== this.asked || this.place.hidden) return; // another layer was chosen, or the view closed
    this.tokens = answer.tokens;
    this.weights = fractions(answer.weights);
    if (!this.chips) this.build(answer);
    const strongest = this.strongest(answer.heads);
    this.drawHeads(answer.heads);
    this.chooseHead(this.head ?? strongest.head);
    this.show(this.held ?? this.from ?? strongest.from);
    this.place.dataset.layer = answer.layer;
  }

  weight(head, from, to) {
    const size = this.tokens.length;
    return this.weights[(head * size + from) * size + to] / 65535;
  }

  // The head and the token of the query with the largest weight on a token of the passage.
  strongest(heads) {
    let best = { head: 0, from: 1, weight: -1 };
    for (let head = 0; head < heads; head += 1)
      for (const [from, a] of this.tokens.entries())
        for (const [to, b] of this.tokens.entries()) {
          if (a.of !== "query" || b.of !== "passage" || !/\w/.test(a.text) || !/\w/.test(b.text)) continue;
          const weight = this.weight(head, from, to);
          if (weight > best.weight) best = { head, from, weight };
        }
    return best;
  }

  build({ layer, layers, heads }) {
    this.place.replaceChildren(document.getElementById("attention").content.cloneNode(true));
    const group = this.place.id;
    const choices = (name, count, checked, made) => this.place.querySelector(`.${name} div`).append(
      ...Array.from({ length: count }, (_, i) => {
        const label = document.createElement("label");
        const input = Object.assign(document.createElement("input"),
          { type: "radio", className: "hidden", name: `${group}-${name}`, value: i, checked: i === checked });
        label.append(input, ...made(i));
        return label;
      }));
    choices("layers", layers, layer, (i) => [`${i + 1}`]);
    choices("heads", heads, null, (i) => {
      const [map, name] = [document.createElement("span"), document.createElement("span")];
      map.className = "map";
      map.append(document.createElement("canvas"));
      name.className = "name";
      name.textContent = `Head ${i + 1}`;
      return [map, name];
    });
    this.place.querySelector(".layers").addEventListener("change", ({ target }) => this.chooseLayer(+target.value).catch((error) => {
      this.place.querySelector(".reading").textContent = error.message;
    }));
    this.place.querySelector(".heads").addEventListener("change", ({ target }) => {
      this.chooseHead(+target.value);
      this.show(this.from);
    });
    this.buildTokens();
  }

  buildTokens() {
    const rows = [...this.place.querySelectorAll(".row")];
    this.svg = this.place.querySelector("svg");
    const begin = this.tokens.findIndex((token) => token.of === "passage");
    this.chips = this.tokens.map(({ text, of }, i) => {
      const chip = document.createElement("button");
      chip.type = "button";
      chip.className = `token ${of}${text.startsWith("##") ? " part" : ""}`;
      chip.textContent = text.replace(/^##/, "");
      chip.addEventListener("pointerenter", () => this.held === null && this.show(i));
      chip.addEventListener("focus", () => this.show(i));
      chip.addEventListener("click", () => {
        this.held = this.held === i ? null : i;
        this.show(i);
      });
      rows[i < begin ? 0 : 1].append(chip);
      return chip;
    });
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    this.place.querySelector(".tokens").addEventListener("keydown", (event) => {
      const at = this.chips.indexOf(event.target);
      const last = this.chips.length - 1;
      const to = { Home: 0, End: last }[event.key] ?? at + (steps[event.key] ?? NaN);
      if (at < 0 || Number.isNaN(to)) return;
      event.preventDefault();
      this.held = null;
      this.chips[Math.max(0, Math.min(last, to))].focus();
    });
    new ResizeObserver(() => this.drawLines()).observe(this.place.querySelector(".tokens"));
  }

  drawHeads(heads) {
    const size = this.tokens.length;
    const ink = getComputedStyle(document.documentElement).getPropertyValue("--accent-rgb").split(",").map(Number);
    const split = this.tokens.findIndex((token) => token.of === "passage") / size;
    for (const [head, canvas] of this.place.querySelectorAll(".heads canvas").entries()) {
      canvas.width = canvas.height = size;
      canvas.parentElement.style.setProperty("--split", `${split * 100}%`);
      const context = canvas.getContext("2d");
      const image = context.createImageData(size, size);
      for (let i = 0; i < size * size; i += 1) {
        const weight = this.weights[head * size * size + i] / 65535;
        image.data.set([...ink, Math.round(Math.sqrt(weight) * 255)], i * 4);
      }
      context.putImageData(image, 0, 0);
    }
  }

  chooseHead(head) {
    this.head = head;
    this.place.querySelectorAll(".heads input")[head].checked = true;
  }

  // Shows what the token `from` attends to, in the chosen head.
  show(from) {
    this.from = from;
    const weights = this.tokens.map((_, to) => this.weight(this.head, from, to));
    for (const [to, chip] of this.chips.entries()) {
      chip.style.setProperty("--heat", (Math.sqrt(weights[to]) * 0.75).toFixed(3));
      chip.classList.toggle("from", to === from);
      chip.tabIndex = to === from ? 0 : -1;
      chip.setAttribute("aria-pressed", to === this.held);
    }
    const order = [...weights.keys()].sort((a, b) => weights[b] - weights[a]).slice(0, NAMED);
    const named = order.map((to) => `${this.named(to)} ${Math.round(weights[to] * 100)} %`);
    this.place.querySelector(".reading").textContent = `${this.named(from)} looks at ${named.join(", ")}.`;
    this.drawLines();
  }

  named(i) {
    const { text, of } = this.tokens[i];
    return of === "mark" ? text : `“${text.replace(/^##/, "…")}” of the ${of}`;
  }

  // A line to each token that is looked at, as wide as its weight.
  drawLines() {
    if (this.from === undefined || !this.svg.isConnected) return;
    const origin = this.svg.getBoundingClientRect();
    const edge = (i, below) => {
      const box = this.chips[i].getBoundingClientRect();
      return [box.left + box.width / 2 - origin.left, (below ? box.bottom : box.top) - origin.top];
    };
    const paths = [];
    for (const to of this.chips.keys()) {
      const weight = this.weight(this.head, this.from, to);
      if (weight < DRAWN || to === this.from) continue;
      const down = this.chips[to].offsetTop > this.chips[this.from].offsetTop;
      const level = this.chips[to].offsetTop === this.chips[this.from].offsetTop;
      const [[x, y], [u, v]] = [edge(this.from, down || level), edge(to, level)];
      const bend = level ? 14 : (v - y) / 2;
      const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
      path.setAttribute("d", `M${x} ${y}C${x} ${y + bend} ${u} ${level ? v + bend : v - bend} ${u} ${v}`);
      path.style.strokeWidth = `${1 + weight * 5}px`;
      path.style.opacity = Math.min(1, 0.3 + weight);
      paths.push(path);
    }
    this.svg.replaceChildren(...paths);
  }
}

// 16-bit fractions from base64, the low byte first.
function fractions(base64) {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  return Uint16Array.from({ length: bytes.length / 2 }, (_, i) => view.getUint16(2 * i, true));
}
