// BERT's tokenizer for text in lower case: words and marks, then the longest pieces that the vocabulary has.

const MOST_LETTERS = 100;
const PUNCTUATION = /[\p{P}$+<=>^`|~]/u;
const IDEOGRAPH = /[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u{20000}-\u{2a6df}\u{2a700}-\u{2ceaf}\u{2f800}-\u{2fa1f}]/u;
const NO_TEXT = /(?![\t\n\r])[\p{Cc}\p{Cf}\p{Cn}\p{Co}\ufffd]/gu;

export class Tokenizer {
  // `vocabulary` is the text of vocab.txt: a piece a line, its number that of the line.
  constructor(vocabulary) {
    this.ids = new Map(vocabulary.split(/\r?\n/).map((piece, id) => [piece, id]));
    [this.unknown, this.begin, this.end] = ["[UNK]", "[CLS]", "[SEP]"].map((piece) => this.ids.get(piece));
  }

  // The numbers of a text's pieces, between the marks for its beginning and its end; at most `most` of them.
  encode(text, most = 256) {
    const pieces = words(text).flatMap((word) => this.#pieces(word));
    return [this.begin, ...pieces.slice(0, most - 2), this.end];
  }

  #pieces(word) {
    const letters = Array.from(word);
    if (letters.length > MOST_LETTERS) return [this.unknown];
    const ids = [];
    for (let from = 0; from < letters.length; ) {
      let to = letters.length;
      const piece = () => (from ? "##" : "") + letters.slice(from, to).join("");
      while (to > from && !this.ids.has(piece())) --to;
      if (to === from) return [this.unknown];
      ids.push(this.ids.get(piece()));
      from = to;
    }
    return ids;
  }
}

// Words in lower case without accents; a punctuation mark and an ideograph are a word each.
function words(text) {
  const plain = text.replace(NO_TEXT, "").normalize("NFD").replace(/\p{Mn}/gu, "").toLowerCase();
  const apart = Array.from(plain, (letter) => (PUNCTUATION.test(letter) || IDEOGRAPH.test(letter) ? ` ${letter} ` : letter));
  return apart.join("").split(/\s+/u).filter(Boolean);
}
