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
}
window.addEventListener("load", () => {
  improve();
  if (window.MathJax?.startup?.promise) window.MathJax.startup.promise.then(improve);
});
window.addEventListener("resize", improve);
