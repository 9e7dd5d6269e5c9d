"""What ``halfstep lint`` does once its flags are read."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.text import Text

from halfstep.errors import HalfstepError
from halfstep.files import write_whole
from halfstep.lint.annotations import workflow_commands
from halfstep.lint.cache import Cache
from halfstep.lint.catalogue import CANNOT_PARSE, catalogue
from halfstep.lint.document import UNREADABLE, decode, encoding_of, lint_bytes, lint_python, lint_text, read_source
from halfstep.lint.finding import Finding
from halfstep.lint.mend import Mended, Rewrite, Rewritten, mend
from halfstep.lint.notebook import read_notebook
from halfstep.lint.report import LintReport, Sources, draw, place_of, source_lines
from halfstep.lint.rule import Rule
from halfstep.lint.rule_page import find_rule, rule_page
from halfstep.lint.runner import lint_files
from halfstep.lint.sarif import sarif
from halfstep.lint.settings import UNASKED, Settings, check_selectors, find_settings
from halfstep.lint.tree import find_files
from halfstep.lint.watch import SECONDS_BETWEEN_LOOKS, watch
from halfstep.report import count_text

FORMATS = ("text", "json", "sarif", "github")
DEPRECATED = ("HS401",)
"""What ``--migrate`` looks for and fixes."""
STDIN = "-"

Targets = Mapping[str, frozenset[str]]
"""File to the codes that are looked for in it."""
Texts = Mapping[str, str]
"""File to what is in it, for one that is not on the disk."""


@dataclass(frozen=True)
class Call:
    """The command line, flag by flag; None and False stand for a flag that was not given."""

    paths: Sequence[str]
    select: Sequence[str] | None
    ignore: Sequence[str] | None
    exclude: Sequence[str] | None
    fix: bool
    unsafe_fixes: bool
    diff: bool
    migrate: bool
    to_halfstep: bool
    format: str
    json_file: str | None
    statistics: bool
    explain: str | None
    watch: bool
    no_cache: bool
    stdin_filename: str | None

    @property
    def reads_stdin(self) -> bool:
        return STDIN in self.paths

    @property
    def fixes(self) -> bool:
        return self.fix or self.unsafe_fixes or self.migrate or (self.diff and not self.to_halfstep)

    @property
    def rewrites(self) -> bool:
        return self.fixes or self.to_halfstep

    def check(self) -> None:
        """Raises HalfstepError for flags that do not go together, or that name what is not there."""
        if self.format not in FORMATS:
            raise HalfstepError(f"--format {self.format}", "there is no such format", f"Use {', '.join(FORMATS)}.")
        check_selectors([""] if self.select == [] else self.select or (), "--select")  # none at all finds nothing
        check_selectors(self.ignore or (), "--ignore")
        if self.reads_stdin and len(self.paths) > 1:
            raise HalfstepError(
                "path -", "it is standard input, and other paths are named too", "Name one or the other."
            )
        if self.stdin_filename is not None and not self.reads_stdin:
            raise HalfstepError("--stdin-filename", "nothing is read from standard input", "Give - as the path.")
        reports = self.format != "text" or self.json_file is not None or self.statistics
        if self.watch and (reports or self.rewrites or self.reads_stdin):
            raise HalfstepError("--watch", "it only shows text, and changes no file", "Take the other flags away.")
        if self.diff and reports:
            raise HalfstepError(
                "--diff", "it shows what would change in place of a report", "Take the other flags away."
            )
        if self.migrate and self.select is not None:
            raise HalfstepError(
                "--migrate", f"it selects {DEPRECATED[0]} by itself", "Take --select away, or use --fix."
            )
        if self.json_file == "-" and self.format not in ("text", "json"):
            raise HalfstepError("--json -", f"--format {self.format} is printed there too", "Name a file for the JSON.")

    def settings_for(self, path: str) -> Settings:
        select = DEPRECATED if self.migrate else self.select
        return find_settings(Path(path)).override(select=select, ignore=self.ignore, exclude=self.exclude)


def lint(call: Call) -> int:
    """Do what ``call`` says, print it, and return the exit status: 1 when more than notes was found, else 0.

    Raises HalfstepError for a call that cannot work. With ``watch`` it ends by an interrupt alone.
    """
    if call.explain is not None:
        _explain(find_rule(call.explain))
        return 0
    call.check()
    if call.watch:
        _watch(call)
    if call.reads_stdin:
        return _lint_stdin(call)
    targets, skipped = _targets(call)
    _tell(skipped)
    if not targets and not skipped:
        _tell([f"there is no Python, no notebook and no DeepSpeed configuration in {', '.join(call.paths)}"])
    found = _lint_files(call, targets)
    mended = [_mend(call, read_source(file), file, targets[file]) for file in _rewritable(call, targets, found)]
    mended = [file for file in mended if file.changed]
    if call.diff:
        return _show_difference(call, mended, found)
    for file in mended:
        file.check_writable()
    for file in mended:
        file.write()
    again = {file.file: lint_text(file.after, file.file, _rules(targets[file.file])) for file in mended}
    findings = [finding for finding in found if finding.file not in again]
    findings += [finding for of_file in again.values() for finding in of_file]
    findings.sort(key=lambda finding: finding.file)
    return _show(call, findings, len(targets), sum(file.num_fixed for file in mended))


def _targets(call: Call) -> tuple[Targets, Sequence[str]]:
    """What is looked at, and a line for each thing that could not be."""
    groups: dict[Settings, list[str]] = {}
    of_folder: dict[str, Settings] = {}
    for path in call.paths:
        folder = path if os.path.isdir(path) else os.path.dirname(path)
        if folder not in of_folder:
            of_folder[folder] = call.settings_for(path)
        groups.setdefault(of_folder[folder], []).append(path)
    targets: dict[str, frozenset[str]] = {}
    skipped: list[str] = []
    for settings, paths in groups.items():
        tree = find_files(paths, settings.exclude, settings.root if call.exclude is None else ".")
        targets |= {file: settings.codes_for(Path(file)) for file in tree.files}
        skipped += tree.skipped
    return dict(sorted(targets.items())), skipped


def _lint_files(call: Call, targets: Targets) -> list[Finding]:
    findings = lint_files(targets, None if call.no_cache else Cache()).findings
    return [finding for finding in findings if finding.code not in UNASKED - targets[finding.file]]


def _rules(codes: frozenset[str]) -> list[Rule]:
    return [rule for code, rule in catalogue().items() if code in codes]


def _lint_stdin(call: Call) -> int:
    file = call.stdin_filename or "<stdin>"
    codes = call.settings_for(file).codes_for(Path(file))
    content = sys.stdin.buffer.read()
    found = lint_bytes(content, file, _rules(codes))
    try:
        text = decode(content, file)
    except UNREADABLE:
        return _show(call, found, 1)
    if not call.rewrites:
        return _show(call, found, 1, texts={file: text})
    mended = _mend(call, text, file, codes) if _rewritable(call, {file: codes}, found) else Mended(file, text, text)
    if call.diff:
        return _show_difference(call, [mended] if mended.changed else [], found)
    sys.stdout.buffer.write(mended.after.encode(encoding_of(content)))  # for an editor, in place of its buffer
    left = lint_text(mended.after, file, _rules(codes))
    return _show(call, left, 1, mended.num_fixed, {file: mended.after}, sys.stderr)


def _rewritable(call: Call, targets: Targets, found: Sequence[Finding]) -> list[str]:
    """The files that the rewrites have something to do in, as far as can be told without doing it."""
    broken = {finding.file for finding in found if finding.code == CANNOT_PARSE.code}
    if call.to_halfstep:
        return [file for file in targets if file not in broken]
    safe_enough = ("safe", "unsafe") if call.unsafe_fixes else ("safe",)
    return list(dict.fromkeys(finding.file for finding in found if call.fixes and finding.fix in safe_enough))


def _mend(call: Call, text: str, file: str, codes: frozenset[str]) -> Mended:
    rewrites: list[Rewrite] = []
    if call.fixes:
        rewrites.append(_fixing(_rules(codes), call.unsafe_fixes))
    if call.to_halfstep:
        rewrites.append(_convert)
    mended = mend(text, file, rewrites)
    _tell(mended.notes)
    return mended


def _fixing(rules: Sequence[Rule], unsafe: bool) -> Rewrite:
    def fix(source: str, file: str) -> Rewritten:
        from halfstep.lint.fix import fix_source

        fixed = fix_source(source, file, lambda text, name: lint_python(text, name, rules), unsafe)
        refused = [(finding.line, f"{finding.code} is not fixed: {why}") for finding, why in fixed.refused]
        return Rewritten(fixed.text, len(fixed.applied), refused)

    return fix


def _convert(source: str, file: str) -> Rewritten:
    from halfstep.lint.to_halfstep import to_halfstep

    conversion = to_halfstep(source, file)
    done = [(None, f"--to-halfstep rewrites {count_text(conversion.num_converted, 'loop')}")]
    return Rewritten(conversion.text, notes=[*(done if conversion.num_converted else []), *conversion.refused])


def _show_difference(call: Call, mended: Sequence[Mended], found: Sequence[Finding]) -> int:
    for file in mended:
        _write(sys.stdout, file.difference())
    num_fixed = sum(file.num_fixed for file in mended)
    changes = f"{count_text(len(mended), 'file')} would change"
    fixes = f"; {num_fixed} of {count_text(len(found), 'finding')} would be fixed" if call.fixes else ""
    _tell([changes + fixes])
    return int(bool(mended) or LintReport(found).found)


def _show(
    call: Call,
    findings: Sequence[Finding],
    num_files: int,
    num_fixed: int = 0,
    texts: Texts | None = None,
    out: TextIO | None = None,
) -> int:
    """Print the report in the format asked for, write its JSON, and give the status that it means."""
    out, texts = out or sys.stdout, texts or {}
    report = LintReport(findings, _sources(findings, texts), num_files, num_fixed, call.statistics)
    root = Path(os.environ.get("GITHUB_WORKSPACE", "."))  # where GitHub's runner has the repository
    if call.format == "json" or call.json_file == "-":
        out.write(report.json())
    elif call.format == "sarif":
        out.write(sarif(report, root, lambda finding: _mended_lines(finding, texts)))
    elif call.format == "github":
        _write(out, workflow_commands(report, root))
    elif out.isatty():
        report.render(Console(file=out))
    else:
        _write(out, f"{report}\n")
    if call.json_file not in (None, "-"):
        write_whole(str(call.json_file), report.json())
    return int(report.found)


def _write(out: TextIO, text: str) -> None:
    """Source may hold characters that ``out`` has no code for."""
    encoding = out.encoding or "utf-8"
    out.write(text.encode(encoding, "backslashreplace").decode(encoding))


def _sources(findings: Sequence[Finding], texts: Texts) -> Sources:
    sources: dict[tuple[str, int | None], Sequence[str]] = {}
    for file in {finding.file for finding in findings}:
        try:
            text = texts[file] if file in texts else read_source(file)
            notebook = read_notebook(text) if file.endswith(".ipynb") else None
        except (OSError, *UNREADABLE):
            continue  # the finding says so
        sources[file, None] = source_lines(text)
        if notebook is not None:
            sources |= {(file, number): cell.lines for number, cell in enumerate(notebook.cells, 1)}
    return sources


def _mended_lines(finding: Finding, texts: Texts) -> list[str] | None:
    try:
        from halfstep.lint.fix_edits import CannotEdit, apply_edits
    except ImportError:
        return None
    try:
        text = texts[finding.file] if finding.file in texts else read_source(finding.file)
        return source_lines(apply_edits(text, finding.edits))
    except CannotEdit:
        return None


def _watch(call: Call) -> None:
    targets, _ = _targets(call)
    trouble = ""

    def look() -> Targets:
        nonlocal targets, trouble
        try:
            targets, _ = _targets(call)
            trouble = ""
        except HalfstepError as error:  # settings that are being edited: those before hold until they can be read
            if str(error) != trouble:
                trouble = str(error)
                _tell([trouble])
        return targets

    def lint_some(files: Sequence[str]) -> Sequence[Finding]:
        return _lint_files(call, {file: targets[file] for file in files})

    console = Console()
    for change in watch(look, lint_some, lambda: time.sleep(SECONDS_BETWEEN_LOOKS)):
        sources = _sources(change.new, {})
        lines = []
        for finding in change.new:
            lines += [*draw(finding, sources.get((finding.file, finding.cell), ()), console.width), Text()]
        lines += [Text(f"gone: {place_of(finding)}: {finding.code} {finding.message}") for finding in change.gone]
        for line in (*lines, Text(LintReport(change.findings, num_files=change.num_files).summary(), "bold")):
            console.print(line, soft_wrap=True)


def _explain(rule: Rule) -> None:
    page = rule_page(rule)
    if sys.stdout.isatty():
        from rich.markdown import Markdown  # takes as long to load as all else that is printed with

        Console().print(Markdown(page))
    else:
        print(page, end="")


def _tell(lines: Sequence[str]) -> None:
    for line in lines:
        print(f"halfstep: {line}", file=sys.stderr)
