// What a reader of the page sees of its texts: where each stands, how large, in which colours. A half transparent
// background is undefined, which no test takes.
(() => {
  const rgb = (text) => {
    const found = text.match(/rgba?\(([^)]+)\)/);
    if (!found) return null;
    const parts = found[1].split(/[ ,/]+/).map(Number);
    return parts.length < 4 || parts[3] === 1 ? parts.slice(0, 3) : parts[3] === 0 ? null : undefined;
  };
  // What is painted below a text: the area of a map that is under its middle, or the nearest box with a background.
  const areas = new Map([...document.querySelectorAll(".map")].filter((map) => map.checkVisibility()).map((map) =>
    [map, [...map.querySelectorAll(".area")].map((area) => [area.getBoundingClientRect(), getComputedStyle(area).fill])]));
  const ground = (element, x, y) => {
    for (const [box, fill] of areas.get(element.closest(".map")) ?? []) {
      if (box.left <= x && x <= box.right && box.top <= y && y <= box.bottom) return rgb(fill);
    }
    for (let at = element; at; at = at.parentElement) {
      const color = at instanceof SVGElement ? null : rgb(getComputedStyle(at).backgroundColor);
      if (color !== null) return color;
    }
    return [255, 255, 255];
  };
  const texts = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.data.trim() || element.closest("title, style, desc")) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const boxes = [...range.getClientRects()].filter((b) => b.width > 0.5 && b.height > 0.5);
    if (!boxes.length || !element.checkVisibility({ contentVisibilityAuto: true })) continue;
    const style = getComputedStyle(element);
    const svg = element instanceof SVGElement;
    const frame = svg && element.closest(".map svg") ? element.closest("svg").querySelector("rect").getBoundingClientRect()
      : element.closest(".tile, .panel, .card, td, th, main, body > header, footer").getBoundingClientRect();
    const at = boxes[0];
    texts.push({
      text: node.data.trim().slice(0, 60), size: parseFloat(style.fontSize), weight: Number(style.fontWeight),
      color: rgb(svg ? style.fill : style.color), ground: ground(element, at.x + at.width / 2, at.y + at.height / 2),
      boxes: boxes.map((b) => [b.left, b.top, b.right, b.bottom]),
      frame: [frame.left, frame.top, frame.right, frame.bottom], label: svg,
    });
  }
  return {
    texts, width: document.documentElement.scrollWidth, window: innerWidth,
    // Shapes that stand for data, with what they stand on.
    marks: [...document.querySelectorAll(".plot .mark:not(.beaten) .dot, .plot .line:not(.front), .step-bar")]
      .filter((e) => e.checkVisibility())
      .map((e) => {
        const style = getComputedStyle(e);
        const panel = getComputedStyle(e.closest(".panel")).backgroundColor;
        const fill = style.fill !== "none" && style.fill !== panel && e.tagName !== "line";
        return { color: rgb(fill ? style.fill : style.stroke), ground: rgb(panel) };
      }),
  };
})()
