// A list of any length that keeps only the visible rows in the page.
import { el } from "./dom.js";

const PAGE = 100;
const KEPT_PAGES = 30;
const RELOAD_MS = 2500;

/**
 * A list of `rowHeight` pixels a row. `load(offset, limit)` promises `{total, rows, place, complete}`, where `place` is that
 * of a row to show, if any; the list is loaded again a little later if `complete` is false or `load` fails. `draw(node, row)`
 * fills a row's node, with null for a row that is still being loaded; `open(row)` is called for a click or Enter, once the
 * row has been loaded; `isOpen(row)` is true for the row that is open, which is marked; `isSame(row, other)` is true for one
 * row that was loaded twice.
 */
export class VirtualList {
  constructor({ rowHeight, load, draw, open, isOpen, isSame, label }) {
    Object.assign(this, { rowHeight, load, draw, open, isOpen, isSame });
    this.space = el("div", { class: "space" });
    this.node = el("div", { class: "list", role: "listbox", tabindex: 0, "aria-label": label }, this.space);
    this.pool = [];
    this.pages = new Map();
    this.total = 0;
    this.current = -1;
    this.chosen = -1; // a row that is to be opened once it has been loaded
    this.loaded = this.reset();
    this.node.addEventListener("scroll", () => this.#schedule(), { passive: true });
    this.node.addEventListener("keydown", (event) => this.#key(event));
    this.observer = new ResizeObserver(() => this.#schedule());
    this.observer.observe(this.node);
  }

  /** Loads all rows again. Those that are shown stay until the first ones have come; the marked row stays marked. Ends
   * without rows if they cannot be read. */
  async reset() {
    const version = this.version = (this.version ?? 0) + 1;
    const answer = await this.load(0, PAGE).catch(() => null);
    if (version !== this.version) return;
    if (!answer) {
      this.#later(() => this.reset());
      return;
    }
    const marked = this.row(this.current);
    this.pages = new Map();
    this.chosen = -1;
    this.current = marked ? answer.rows.findIndex((row) => this.isSame(row, marked)) : -1;
    this.#take(0, answer);
  }

  dispose() {
    this.observer.disconnect();
    this.version += 1; // no later answer is shown
  }

  row(index) { return this.pages.get(Math.floor(index / PAGE))?.[index % PAGE] ?? null; }

  async #need(page) {
    if (this.pages.has(page)) return;
    this.pages.set(page, []);
    if (this.pages.size > KEPT_PAGES) this.pages.delete(this.pages.keys().next().value);
    const { version } = this;
    const answer = await this.load(page * PAGE, PAGE).catch(() => null);
    if (version !== this.version) return;
    if (answer) {
      this.#take(page, answer);
    } else {
      this.pages.delete(page);
      this.#later(() => this.#render());
    }
  }

  /** Calls `action` after a while, unless the list has been reset or disposed meanwhile. */
  #later(action) {
    const { version } = this;
    setTimeout(() => version === this.version && action(), RELOAD_MS);
  }

  #take(page, answer) {
    this.pages.set(page, answer.rows);
    if (answer.total !== this.total) {
      this.total = answer.total;
      this.space.style.height = `${this.total * this.rowHeight}px`;
    }
    if ((answer.place ?? -1) >= 0) this.#move(answer.place);
    else this.#render();
    if (answer.complete === false) this.#later(() => this.reset());
    const chosen = this.row(this.chosen);
    if (chosen) {
      this.chosen = -1;
      this.open(chosen);
    }
  }

  #schedule() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.#render();
    });
  }

  #render() {
    const { rowHeight, total } = this;
    const first = Math.max(0, Math.floor(this.node.scrollTop / rowHeight) - 4);
    const count = Math.min(total - first, Math.ceil(this.node.clientHeight / rowHeight) + 8);
    while (this.pool.length < count) {
      const node = el("div", { class: "item", role: "option" });
      node.style.height = `${rowHeight}px`;
      node.addEventListener("click", () => this.#choose(node.index));
      this.pool.push(node);
      this.space.append(node);
    }
    const shown = new Set();
    for (let index = first; index < first + count; index += 1) {
      const node = this.pool[index % this.pool.length]; // a row keeps its node while it is scrolled
      const row = this.row(index);
      if (node.index !== index || node.row !== row) {
        node.index = index;
        node.row = row;
        node.id = `item-${index}`;
        node.setAttribute("aria-setsize", total);
        node.setAttribute("aria-posinset", index + 1);
        node.style.transform = `translateY(${index * rowHeight}px)`;
        this.draw(node, row);
      }
      if (this.current < 0 && row && this.isOpen(row)) this.current = index; // none is marked yet
      node.setAttribute("aria-selected", index === this.current);
      node.hidden = false;
      shown.add(node);
    }
    for (const node of this.pool.filter((one) => !shown.has(one))) {
      node.hidden = true;
      node.index = -1;
      node.removeAttribute("id");
    }
    if (!count) return;
    for (const page of new Set([Math.floor(first / PAGE), Math.floor((first + count - 1) / PAGE)])) this.#need(page);
  }

  #choose(index) {
    this.#move(index);
    const row = this.row(index);
    this.chosen = row ? -1 : index;
    if (row) this.open(row);
  }

  #move(index) {
    this.current = Math.max(0, Math.min(this.total - 1, index));
    this.node.setAttribute("aria-activedescendant", `item-${this.current}`);
    const top = this.current * this.rowHeight;
    if (top < this.node.scrollTop) this.node.scrollTop = top;
    const below = top + this.rowHeight - this.node.clientHeight;
    if (below > this.node.scrollTop) this.node.scrollTop = below;
    this.#render();
  }

  #key(event) {
    const rows = Math.max(1, Math.floor(this.node.clientHeight / this.rowHeight) - 1);
    const steps = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1, PageDown: rows, PageUp: -rows, Home: -this.total, End: this.total };
    if (event.key in steps && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      this.chosen = -1;
      this.#move(this.current + steps[event.key]);
    } else if (event.key === "Enter" && this.current >= 0) {
      event.preventDefault();
      this.#choose(this.current);
    }
  }
}
