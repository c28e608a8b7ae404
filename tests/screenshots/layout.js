// The faults in the layout of every report of the page, in words: texts that overlap, that are cut,
// and marks that do not stand below what they mark.
() => {
  const faults = [];
  const slack = 1.5; // pixels that rounding may move an edge
  const shown = (element) => element.checkVisibility({ visibilityProperty: true });
  const say = (node) => JSON.stringify(node.textContent.trim().slice(0, 40));
  const place = (r) => `${Math.round(r.left)},${Math.round(r.top)}`;

  for (const report of document.querySelectorAll(".sbp")) {
    if (!shown(report)) continue;
    const outer = report.getBoundingClientRect();
    if (report.scrollWidth > report.clientWidth + slack)
      faults.push(`the report is ${report.scrollWidth} wide in ${report.clientWidth}`);
    if (outer.right > document.documentElement.clientWidth + slack)
      faults.push(`the report ends at ${outer.right}, right of the page`);
    const boxes = [];
    const walker = document.createTreeWalker(report, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const node = walker.currentNode;
      const parent = node.parentElement;
      if (!node.textContent.trim() || parent.closest("style,title") || !shown(parent)) continue;
      const range = document.createRange();
      range.selectNodeContents(node);
      for (const rect of range.getClientRects()) {
        if (rect.width < 1) continue;
        boxes.push({ node, rect });
        for (let up = parent; up !== report.parentElement; up = up.parentElement) {
          const style = getComputedStyle(up);
          const box = up.getBoundingClientRect();
          const scrolls = ["auto", "scroll"].includes(style.overflowX) && up !== report;
          const left = rect.left + up.scrollLeft;
          if (scrolls) {
            if (left < box.left - slack) faults.push(`${say(node)} cannot be scrolled to`);
            break;
          }
          if (style.display === "inline") continue;
          const cuts = up === report || style.overflowX !== "visible" || up.localName === "svg";
          if (cuts && (rect.left < box.left - slack || rect.right > box.right + slack))
            faults.push(`${say(node)} at ${place(rect)} is cut by ${up.localName}.${up.className}`);
        }
      }
    }
    boxes.sort((a, b) => a.rect.top - b.rect.top);
    boxes.forEach((one, i) => {
      for (let j = i + 1; j < boxes.length; j++) {
        const other = boxes[j];
        if (other.rect.top > one.rect.bottom - slack) break;
        if (other.node === one.node) continue;
        const wide =
          Math.min(one.rect.right, other.rect.right) - Math.max(one.rect.left, other.rect.left);
        const high = Math.min(one.rect.bottom, other.rect.bottom) - other.rect.top;
        // Lines may touch: a line box is higher than its letters.
        if (wide > slack && high > 0.3 * Math.min(one.rect.height, other.rect.height))
          faults.push(`${say(one.node)} and ${say(other.node)} overlap at ${place(other.rect)}`);
      }
    });
    for (const code of report.querySelectorAll("pre")) if (shown(code)) faults.push(...marks(code));
  }
  return faults;

  // Every mark begins below the first of the characters that it marks.
  function marks(code) {
    const wrong = [];
    const text = code.textContent;
    for (const mark of code.querySelectorAll("b, i")) {
      const before = document.createRange();
      before.setStart(code, 0);
      before.setEndBefore(mark);
      const at = before.toString().length;
      const start = text.lastIndexOf("\n", at) + 1;
      const column = at - start;
      let end = start - 1; // of the source line above: the last one that has a number
      let base = text.lastIndexOf("\n", end - 1) + 1;
      while (!/\d/.test(text.slice(base, base + text.slice(base).indexOf("|")))) {
        end = base - 1;
        base = text.lastIndexOf("\n", end - 1) + 1;
      }
      if (text.slice(base, end).endsWith("(no source at hand)")) continue;
      const [first, above] = [edge(code, at), edge(code, base + column)];
      if (Math.abs(first.left - above.left) > slack)
        wrong.push(`${say(mark)} begins ${first.left - above.left} pixels off`);
      if (first.top < above.bottom - slack) wrong.push(`${say(mark)} is not below its line`);
    }
    return wrong;
  }

  // The box of the character at this place of an element's text.
  function edge(element, place) {
    const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const node = walker.currentNode;
      if (place < node.length) {
        const range = document.createRange();
        range.setStart(node, place);
        range.setEnd(node, place + 1);
        return range.getBoundingClientRect();
      }
      place -= node.length;
    }
    return null;
  }
}
