// Evaluated in the page by contrast.py: [text or selector, contrast ratio] of all that is visible.
(graphics) => {
  const parse = (text) => {
    const [, name, inner] = text.match(/^(\w+)\((.*)\)$/), numbers = inner.match(/[-\d.e]+(?=[\s,/)]|$)/g).map(Number);
    const [r, g, b, a = 1] = numbers;
    return name === "color" ? [255 * r, 255 * g, 255 * b, a] : [r, g, b, a];
  };
  const over = ([r, g, b, a], below) => [r, g, b].map((each, at) => each * a + below[at] * (1 - a)).concat(1);
  const background = (node) => {
    if (!node) return parse(matchMedia("(prefers-color-scheme: dark)").matches ? "rgb(0, 0, 0)" : "rgb(255, 255, 255)");
    const own = parse(getComputedStyle(node).backgroundColor);
    return own[3] === 1 ? own : over(own, background(node.parentElement));
  };
  const plain = (node) => {
    for (let each = node; each; each = each.parentElement) {
      const {opacity, filter} = getComputedStyle(each);
      if (opacity !== "1" || filter !== "none") throw new Error("opacity or filter: " + each.outerHTML.slice(0, 99));
    }
  };
  const luminance = (color) => {
    const [r, g, b] = color.map((each) => each / 255).map((each) => each <= .04045 ? each / 12.92 : ((each + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const ratio = (one, other, node) => {
    plain(node);
    const [dark, light] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (light + .05) / (dark + .05);
  };
  const visible = (node) => node.checkVisibility({visibilityProperty: true}) && node.getClientRects().length && !node.closest(".unseen");
  const found = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode.textContent.trim(), node = texts.currentNode.parentElement;
    if (!text || !visible(node) || node.closest("script, style, template")) continue;
    const color = parse(getComputedStyle(node)[node instanceof SVGElement ? "fill" : "color"]), below = background(node);
    found.push(["text " + text.slice(0, 60), ratio(over(color, below), below, node)]);
  }
  for (const [selector, property] of Object.entries(graphics)) {
    for (const node of document.querySelectorAll(selector)) {
      if (!visible(node) || !node.getBoundingClientRect().width) continue;
      const color = parse(getComputedStyle(node)[property]), below = background(node.parentElement);
      found.push([selector, ratio(over(color, below), below, node)]);
    }
  }
  return found;
}
