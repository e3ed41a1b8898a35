// For the search: pages that list and measure come after those that say what to call.
var Scorer = {
  score: ([page, , , , score]) =>
    /^(bibliography|changelog|experiments\/benchmarks|papers\/)/.test(page) ? score / 4 : score,
  // As in Sphinx:
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
