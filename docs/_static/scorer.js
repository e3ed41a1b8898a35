// For the search: results, and words in pages that list or measure, come after what says what to call.
var Scorer = {
  score: ([page, , , , score]) =>
    /^papers\//.test(page) ||
    (score <= 5 && /^(bibliography|changelog|experiments\/benchmarks)/.test(page))
      ? score / 4
      : score,
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
