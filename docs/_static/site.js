// What the theme leaves out for keyboards and screen readers.
function improve() {
  // A region that scrolls sideways can be reached, and scrolled with the arrow keys.
  for (const region of document.querySelectorAll("mjx-container[display], table, .highlight pre")) {
    if (region.scrollWidth > region.clientWidth + 1) region.tabIndex = 0;
  }
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

// On a phone, the rows of a table of text become cards: see site.css. Numbers stay in columns.
function labelCells() {
  for (const table of document.querySelectorAll(".bd-article table")) {
    const titles = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent.trim());
    const cells = [...table.querySelectorAll("tbody td")];
    if (!cells.some((cell) => cell.textContent.trim().length > 40)) continue;
    if (titles.length < 3 && table.scrollWidth <= table.clientWidth + 1) continue; // It fits.
    table.classList.add("cards");
    for (const cell of cells) {
      if (cell.textContent.trim()) cell.dataset.title = titles[cell.cellIndex] ?? "";
    }
  }
}

// Lines break before the sign of "0.5 ± 0.1", if at all, and not within "256 × 640".
function keepNumbers() {
  for (const cell of document.querySelectorAll(".bd-article td")) {
    if (!/[±×]/.test(cell.textContent) || cell.textContent.trim().length > 40) continue;
    const texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
      const text = texts.currentNode;
      text.data = text.data.replace(/± /g, "±\u00a0").replace(/ × /g, "\u00a0×\u00a0");
    }
  }
}

window.addEventListener("load", () => {
  improve(); // First: on a wider screen, after a turn of the phone, a table of cards scrolls again.
  labelCells();
  keepNumbers();
  if (window.MathJax?.startup?.promise) window.MathJax.startup.promise.then(improve);
});
window.addEventListener("resize", improve);
