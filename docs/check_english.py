"""Find phrases that readers have to translate, in the documentation and in texts of the package; part of `make check`.

Checks README.md, CONTRIBUTING.md, the pages in docs/, the [Unreleased] section of CHANGELOG.md, and the strings and
comments of the Python files in `SOURCES`. Code spans and code blocks are not checked, so a phrase can be quoted in
backticks.

    python docs/check_english.py                        # everything
    python docs/check_english.py docs/data.md fabric    # these files, and all Python files in these folders
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Python files and folders that pass. To check more of the package, add a line here.
SOURCES: tuple[str, ...] = (
    "__init__.py",
    "__main__.py",
    "accelerators",
    "benchmarks",
    "callbacks",
    "checkpoint",
    "cli",
    "compat",
    "console.py",
    "data",
    "deferred_compiler.py",
    "docs/check_docs.py",
    "docs/make_pictures.py",
    "doctor",
    "errors.py",
    "examples",
    "fabric",
    "files.py",
    "integrations",
    "lazy.py",
    "loggers",
    "messages.py",
    "optim",
    "precision",
    "profilers",
    "protocols.py",
    "recipes",
    "remote",
    "report",
    "settings",
    "strategies",
    "tracebacks.py",
    "trainer",
    "tree.py",
    "tuner",
    "yaml_file.py",
)

# (regular expression, replacement). A space matches any whitespace, including line breaks. Case is ignored.
PHRASES: tuple[tuple[str, str], ...] = (
    (r"(?:there )?(?:is|are|was|were) no(?![-\w])(?! longer| more than| less than| fewer than)", "is not a"),
    (r"(?:there )?(?:is|are) (?-i:none)(?! of)", "is not one"),
    (r"that there (?:is|are) not", "that does not exist, unknown"),
    (
        r"(?:has|have) not(?= (?:the|a|an|its|their|that|this|one|any|all)\b)|(?:has|have) not(?=\s*[.,;:)])",
        "does not have",
    ),
    (r"gave", "returned, passed, had"),
    (r"told", "notified, logged, known"),
    (r"an? (?:[\w.-]+ ){1,3}of (?:its|their|his|your|our) own", "its own folder, not: a folder of its own"),
    (r"for ever", "forever"),
    (r"mend(?:s|ed|ing)?", "fix"),
    (r"by hand", "manually, hand-written"),
    (r"so many", "that many, this number of"),
    (r"nobody", "no one; better: name the subject"),
    (r"(?:any|every|some)body", "anyone, everyone, someone; better: name the subject"),
    (r"otherwise than", "differently from"),
    (r"says? of|hears? of", "says about, is notified of"),
    (r"(?:go|goes|going|went|gone) on(?! (?:the|a|an|each|every|one|its) )", "continue"),
    (r"of which", "two sentences"),
    (r"shar(?:e|es|ed|ing) out|dealt|deal(?:s|ing)? out", "distribute, shard over ranks"),
    (r"seal(?:s|ed|ing)?(?!:)", "digest, checksum"),
    (r"comes? out even", "be divisible"),
    (r"part(?:s|ed)? ways", "diverge"),
    (r"anew", "again, from scratch"),
    (r"in the place of", "instead of"),
    (r"(?:at|in) hand", "current"),
    (r"(?:puts?|putting) (?:\w+ )?back", "load, restore"),
    (r"knows? (?:ranks|the ranks)", "provides ranks"),
    (r"(?:what|as) the user (?:typed|asked for)", "the user's argument, requested"),
    (r"cannot (?:work|be made from)", "is invalid, cannot be created"),
    (r"lest|whence|thereof|therein|wherein", "so that ... not, from, of it, in it"),
    (r"whilst|amongst", "while, among"),
    (r"hands? out|gives? back|given back", "return, release, restore"),
    (r"looks? after", "monitor"),
    (r"knows? no", "does not support, does not have"),
    (r"roll call|in vain|on the spot|thrown away", "registration, without effect, immediately, discarded"),
    (r"(?:without|worth) a word", "silently, worth reporting"),
    (r"for good|be it", "permanently, even if"),
    (r"says? it(?! is| has| was| will)", "names it, shows it, records it"),
    (r"(?:does|do|did) not tell|tells? nothing", "does not show, is unknown"),
    (r"gets? told|run dry|broken? off", "is notified, is idle, interrupted"),
    (
        r"(?:de|re|un)?(?:author|capital|categor|central|character|custom|emphas|final|formal|general|initial|local"
        r"|material|maxim|memor|minim|modern|neutral|normal|optim|organ|parallel|penal|popular|priorit|quant|random"
        r"|real|recogn|regular|serial|special|stabil|standard|summar|symbol|synchron|token|util|vector|visual)"
        r"is(?:e|es|ed|ing|er|ers|ation|ations)",
        "US spelling: -ize, -ization",
    ),
    (r"analys(?:e|ed|ing)", "US spelling: analyze"),
    (r"(?:behavi|col|fav|flav|hon|lab|neighb)our(?:s|ed|ing|able|ite|hood|less|al)?", "US spelling: -or"),
    (r"(?:cent|fib|met)re[sd]?", "US spelling: -er"),
    (r"(?:label|model|signal|travel)l(?:ed|ing)", "US spelling: one l"),
    (r"(?:mis)?spelt|learnt|burnt", "US spelling: -ed"),
    (r"grey|artefacts?|licence|defence|programme", "US spelling: gray, artifact, license, defense, program"),
)

# Checked in pages only.
PHRASES_OF_PAGES: tuple[tuple[str, str], ...] = (
    (r"(?:as a |on the )?whole", "full, complete"),
    (r"cuts?|cutting", "split, shard"),
    (r"(?:is|are|was|were) said", "reported, logged"),
)

# Matches that begin like this are plain English: "there is no", "as a whole".
FINE = ("there ", "as a ", "on the ")


def compiled(phrases: tuple[tuple[str, str], ...], gap: str) -> list[tuple[re.Pattern[str], str]]:
    """Return the patterns of phrases, with `gap` for each space."""
    return [(re.compile(rf"\b(?:{text.replace(' ', gap)})\b", re.IGNORECASE), instead) for text, instead in phrases]


RULES = compiled(PHRASES, r"\s+")
RULES_OF_PAGES = RULES + compiled(PHRASES_OF_PAGES, r"\s+")
# In Python a phrase may continue in the next literal or comment, so that quotes and number signs separate words, too.
ANYWHERE = re.compile("|".join(pattern.pattern for pattern, _ in compiled(PHRASES, r"[\s\"'#f]+")), re.IGNORECASE)
CODE = re.compile(r"^ *```.*?^ *```$|^<!--.*?-->$|`[^`\n]*(?:\n[^`\n]+)?`|\]\([^)]*\)", re.MULTILINE | re.DOTALL)
TEXTS = {"STRING", "FSTRING_MIDDLE", "COMMENT"}


def blank(match: re.Match[str]) -> str:
    """Return a text with the same lines that matches no rule."""
    return re.sub(r"[^\n]", "_", match.group())


def texts_of_code(source: str) -> str:
    """Return Python source with spaces in place of everything except the texts of strings and comments."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    kept = [character if character == "\n" else " " for character in source]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if tokenize.tok_name[token.type] in TEXTS:
            first, last = (starts[row - 1] + column for row, column in (token.start, token.end))
            kept[first:last] = source[first:last]
    text = re.sub(r"\{[^{}\n]*\}", blank, "".join(kept))
    return re.sub(r"\b[bfru]+(?=[\"'])|[\"'#]", lambda match: " " * len(match.group()), text)


def unreleased(text: str) -> str:
    """Return a changelog with only its first section readable."""
    sections = list(re.finditer(r"^## .*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    return text[: sections[0].end()] if sections else text


def problems(path: Path) -> list[str]:
    """Return each phrase to replace in a file, as `file:line: phrase -> replacement`."""
    text, rules = path.read_text(encoding="utf-8"), RULES_OF_PAGES
    if path.suffix == ".py":
        if not ANYWHERE.search(text):  # true of most files, and much faster than reading their tokens
            return []
        text, rules = texts_of_code(text), RULES
    elif path.name == "CHANGELOG.md":
        text = unreleased(text)
    text = CODE.sub(blank, text)
    phrases = sorted(found(text, rules))
    return [f"{path.relative_to(ROOT)}:{line}: {phrase} -> {instead}" for line, phrase, instead in phrases]


def found(text: str, rules: list[tuple[re.Pattern[str], str]]) -> Iterator[tuple[int, str, str]]:
    """Give the line, the phrase and its replacement for each phrase in a text."""
    for pattern, instead in rules:
        for match in pattern.finditer(text):
            phrase = " ".join(match.group().split())
            if not phrase.lower().startswith(FINE):
                yield text.count("\n", 0, match.start()) + 1, phrase, instead


def files(names: list[str]) -> list[Path]:
    """Return the files with these names, relative to the root, and the Python files in folders among them."""
    paths = [ROOT / name for name in names]
    return [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]


def main(names: list[str]) -> int:
    pages = sorted(str(page) for page in (ROOT / "docs").rglob("*.md"))
    chosen = names or ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *pages, *SOURCES]
    phrases = [problem for path in files(chosen) for problem in problems(path)]
    for problem in phrases:
        print(problem, file=sys.stderr)
    return 1 if phrases else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
