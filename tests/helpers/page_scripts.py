"""JavaScript that browser tests of the page run in it."""

COLOR = """
(image) => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d");
  canvas.drawImage(image, 0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
}
"""
"""The mean colour of a picture."""

NOTE_TICKS = """
const texts = [];
const { fillText } = CanvasRenderingContext2D.prototype;
CanvasRenderingContext2D.prototype.fillText = function (text, ...place) {
  if (this.textAlign === "right") texts.push([this.canvas, text]);
  return fillText.call(this, text, ...place);
};
window.ticksOf = (chart) => {
  const drawn = texts.filter(([canvas]) => canvas.closest(".chart")?.dataset.chart === chart);
  return [...new Set(drawn.map(([_, text]) => text))];
};
"""
"""Notes the texts beside the y axis of each chart."""

COUNT_CANVASES = """
const getContext = HTMLCanvasElement.prototype.getContext;
window.canvases = 0;
HTMLCanvasElement.prototype.getContext = function (...all) {
  window.canvases += 1;
  return getContext.apply(this, all);
};
"""

SCROLL = """
async () => {
  const list = document.querySelector(".list");
  let frames = 0;
  const started = performance.now();
  while (performance.now() - started < 3000) {
    await new Promise(requestAnimationFrame);
    list.scrollTop += 130;
    frames += 1;
  }
  return (1000 * frames) / (performance.now() - started);
}
"""

CONTRASTS = """
() => {
  const parse = (text) => (text.match(/[\\d.]+/g) ?? [0, 0, 0, 0]).map(Number);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = (node) => {
    const layers = [];
    for (let at = node; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor));
    const over = (below, [r, g, b, a = 1]) => below.map((value, i) => value * (1 - a) + [r, g, b][i] * a);
    return layers.reverse().reduce(over, [255, 255, 255]);
  };
  let worst = 99;
  for (const node of document.querySelectorAll("main *, #top *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!own || !node.checkVisibility() || node.tagName === "OPTION") continue;
    const [one, two] = [light(parse(getComputedStyle(node).color)), light(behind(node))].sort((a, b) => b - a);
    worst = Math.min(worst, (one + 0.05) / (two + 0.05));
  }
  return worst;
}
"""
