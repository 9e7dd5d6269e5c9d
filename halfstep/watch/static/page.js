// One page in three forms, by its address: the list of runs, one run, several compared.

import { comparePage } from "./compare_page.js";
import { runPage } from "./run_page.js";
import { runsPage } from "./runs_page.js";
import { tickAges } from "./text.js";

const page = document.getElementById("page");
const path = location.pathname;
if (path.startsWith("/run/")) {
  runPage(page, path.slice("/run/".length).replace(/\/$/, "").split("/").map(decodeURIComponent).join("/"));
} else if (path === "/compare") {
  comparePage(page, new URLSearchParams(location.search).getAll("run"));
} else {
  runsPage(page);
}
tickAges();
