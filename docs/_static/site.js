// What the theme leaves out for keyboards and screen readers.
function improve() {
  fitFormulas();
  labelCells();
  // A region that scrolls sideways can be reached, and scrolled with the arrow keys.
  for (const region of document.querySelectorAll("mjx-container[display], .bd-article pre")) {
    if (region.scrollWidth > region.clientWidth + 1) region.tabIndex = 0;
  }
  nameWideTables();
  showWhatScrolls();
  for (const summary of document.querySelectorAll("nav summary:not([aria-label])")) {
    summary.setAttribute("aria-label", "Pages of this section");
  }
  for (const summary of document.querySelectorAll("article summary[aria-label]")) {
    summary.removeAttribute("aria-label"); // Its text is its name.
  }
  for (const link of document.querySelectorAll(".sphx-glr-thumbcontainer a")) {
    link.setAttribute("aria-label", link.textContent); // The text is hidden behind the picture.
  }
  for (const button of document.querySelectorAll(".search-button-field[aria-label]")) {
    button.removeAttribute("aria-label"); // Its text is its name.
  }
  for (const brand of document.querySelectorAll(".sidebar-primary-item > .navbar-brand")) {
    brand.parentElement.setAttribute("role", "navigation"); // All of a page is in a landmark.
    brand.parentElement.setAttribute("aria-label", "Home");
  }
  for (const citation of document.querySelectorAll(".citation-list > .citation")) {
    citation.setAttribute("role", "listitem"); // A list has items.
  }
}

// A formula that is a little too wide is set smaller, in steps: browsers round the size of letters.
function fitFormulas() {
  for (const formula of document.querySelectorAll("mjx-container[display]")) {
    formula.style.fontSize = "";
    for (let size = 95; size >= 75 && formula.scrollWidth > formula.clientWidth; size -= 5) {
      formula.style.fontSize = `${size}%`;
    }
  }
}

// The sides of a region at which more is to see: they fade in site.css.
function showWhatScrolls() {
  const regions = "mjx-container[display], .bd-article pre, .pst-scrollable-table-container";
  for (const region of document.querySelectorAll(regions)) {
    const update = () => {
      const hidden = region.scrollWidth - region.clientWidth - region.scrollLeft;
      region.classList.toggle("scrolls", region.scrollWidth > region.clientWidth + 1);
      region.classList.toggle("has-more", hidden > 1);
      region.classList.toggle("has-less", region.scrollLeft > 1);
    };
    region.onscroll = update;
    update();
  }
}

// A table that scrolls is a region with a name, and its first column stays: see site.css.
function nameWideTables() {
  const tables = document.querySelectorAll(".pst-scrollable-table-container");
  for (const [number, region] of tables.entries()) {
    region.classList.remove("wide-table");
    const wide = region.scrollWidth > region.clientWidth + 1;
    region.classList.toggle("wide-table", wide);
    if (wide) {
      const heading = region.closest("section")?.querySelector(":scope > :is(h1, h2, h3, h4)");
      const title = heading?.firstChild.textContent ?? document.title;
      region.tabIndex = 0;
      region.setAttribute("role", "region");
      region.setAttribute("aria-label", `Table ${number + 1}: ${title}`);
    } else {
      region.removeAttribute("role");
      region.removeAttribute("aria-label");
    }
  }
}

// The rows of a table of text become cards on a phone, and where it would scroll: see site.css.
// Numbers stay in columns.
function labelCells() {
  for (const table of document.querySelectorAll(".bd-article table")) {
    const titles = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent.trim());
    const cells = [...table.querySelectorAll("tbody td")];
    if (!cells.some((cell) => cell.textContent.trim().length > 40)) continue;
    table.classList.remove("cards");
    const wide = table.parentElement.scrollWidth > table.parentElement.clientWidth + 1;
    if (!wide && (titles.length < 3 || innerWidth > 576)) continue; // It fits.
    table.classList.add("cards");
    for (const cell of cells) {
      if (!cell.textContent.trim() || "title" in cell.dataset) continue;
      cell.dataset.title = titles[cell.cellIndex] ?? "";
      const content = document.createElement("div");
      content.append(...cell.childNodes);
      cell.append(content);
    }
  }
}

// Lines do not break within "0.5 ± 0.1" or "256 × 640"; in narrow cells, they may before the ±.
function keepNumbers() {
  for (const block of document.querySelectorAll(".bd-article :is(p, li, td)")) {
    if (!/[±×]/.test(block.textContent)) continue;
    const inCell = block.closest("td") && block.textContent.trim().length <= 40;
    const texts = document.createTreeWalker(block, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
      const text = texts.currentNode;
      if (text.parentElement.closest("code, pre")) continue;
      if (!inCell) text.data = text.data.replace(/ ±/g, "\u00a0±");
      text.data = text.data.replace(/± /g, "±\u00a0").replace(/ × /g, "\u00a0×\u00a0");
    }
  }
}

// Long names such as "prototypical_by_samples" break after an underscore.
function breakNames() {
  for (const cell of document.querySelectorAll(".bd-article td:first-child")) {
    const texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
      const at = texts.currentNode.data.indexOf("_") + 1;
      if (at > 0) texts.currentNode.splitText(at).before(document.createElement("wbr"));
    }
  }
}

window.addEventListener("load", () => {
  keepNumbers();
  breakNames();
  improve();
  if (window.MathJax?.startup?.promise) window.MathJax.startup.promise.then(improve);
});
// Also when a sidebar has moved.
let width = 0;
new ResizeObserver(([{ contentRect }]) => {
  if (contentRect.width !== width && document.readyState === "complete") improve();
  width = contentRect.width;
}).observe(document.querySelector(".bd-article") ?? document.body);
document.addEventListener("toggle", improve, true); // Of folded code.
