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
    if (titles.length < 3 || !cells.some((cell) => cell.textContent.trim().length > 40)) continue;
    table.classList.add("cards");
    for (const cell of cells) {
      if (cell.textContent.trim()) cell.dataset.title = titles[cell.cellIndex] ?? "";
    }
  }
}
window.addEventListener("load", () => {
  labelCells();
  improve();
  if (window.MathJax?.startup?.promise) window.MathJax.startup.promise.then(improve);
});
window.addEventListener("resize", improve);
