// Orders the results of the site's search: pages that answer questions come before those that record
// why or when. Without it, pages in which a word occurs are in alphabetical order.
const FIRST = ["guide/", "howto/", "reference/configuration"];
const LAST = ["decisions/", "changelog", "benchmarks", "results", "faults", "scaling", "classic"];

var Scorer = {
  score: ([docname, , , , score]) => {
    const isFirst = FIRST.some((start) => docname.startsWith(start));
    if (isFirst && score < Scorer.title) return score + 3; // a page of that title stays above
    return LAST.some((start) => docname.startsWith(start)) ? score - 3 : score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
