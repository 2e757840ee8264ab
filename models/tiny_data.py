"""The books behind `kvasir-tiny`.

Why this exists: the model is trained on public-domain text alone, taken from Debian packages
so that anybody gets the same bytes. This file finds the books in those packages, undoes
their line wrapping, and keeps the parts that chat samples are made of.
"""

from __future__ import annotations

import gzip
import re
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGES = ["bible-kjv", "bible-kjv-text", "dict-jargon", "dict-devil", "r-cran-janeaustenr"]
GET_TEXT = f"""\
mkdir text && cd text
apt-get download {" ".join(PACKAGES)}
for deb in *.deb; do dpkg -x "$deb" .; done && cd .."""
# entries left out of the two dictionaries: slurs, oaths, tables drawn with lines
UNWANTED = re.compile(r"(?i)nigger|negro|fuck|shit|\brap(?:e|ed|ing)\b|masturbat|\bfag\b|[─│├]")
PLAIN = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "´": "'", "—": "--", "_": "", "\u00ad": ""})
HOLD_OUT = 50  # of every 50 documents, the first is never trained on


@dataclass
class Corpus:
    """Documents by source, and the parts (never held out) that chat samples are made of."""

    docs: dict[str, list[str]]
    verses: list[str] = field(default_factory=list)
    definitions: list[tuple[str, str]] = field(default_factory=list)
    paragraphs: list[str] = field(default_factory=list)

    def add(self, source: str, text: str) -> bool:
        """Keep a document; True when it may be trained on."""
        self.docs[source].append(text)
        return (len(self.docs[source]) - 1) % HOLD_OUT != 0


def plain(text: str) -> str:
    """ASCII quotes and dashes, so that 4096 tokens are not spent on typography."""
    return text.translate(PLAIN)


def paragraphs(text: str) -> list[str]:
    """Undo hard line wrapping; indented blocks (poems) keep their lines."""
    out = []
    for block in re.split(r"\n\s*\n", plain(text)):
        lines = [line for line in block.split("\n") if line.strip()]
        verse = len(lines) > 1 and all(line.startswith("   ") for line in lines)
        if lines:
            tidy = [re.sub(r"\s+", " ", line.strip()) for line in lines]
            out.append(("\n" if verse else " ").join(tidy))
    return out


def r_strings(path: Path) -> Iterator[list[str]]:
    """The character vectors in an R lazy-load database (one Austen novel each)."""
    raw, at = path.read_bytes(), 0
    while at < len(raw):
        stream = zlib.decompressobj()
        data = stream.decompress(raw[at + 4 :])
        at = len(raw) - len(stream.unused_data)
        pos = 18 + struct.unpack(">i", data[14:18])[0] + 4  # header, native encoding, type flags
        (count,), pos, lines = struct.unpack(">i", data[pos : pos + 4]), pos + 4, []
        for _ in range(count):
            size = max(0, struct.unpack(">i", data[pos + 4 : pos + 8])[0])
            lines.append(data[pos + 8 : pos + 8 + size].decode("utf-8"))
            pos += 8 + size
        yield lines


def read_bible(root: Path, corpus: Corpus) -> None:
    """King James, a chapter to a document, through the package's own reader."""
    chapters: dict[str, list[str]] = {}
    listing = subprocess.run(
        [root / "usr/bin/bible", "-f", "-p", root / "usr/lib", "gen1:1-rev22:21"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for line in listing.splitlines():
        where, _, verse = line.partition(" ")
        chapters.setdefault(where.split(":")[0], []).append(plain(verse.strip()))
    for verses in chapters.values():
        if corpus.add("kjv", " ".join(verses)):
            corpus.verses += verses


def read_austen(path: Path, corpus: Corpus) -> None:
    """Six novels, a chapter to a document."""
    for lines in r_strings(path):
        for chapter in re.split(r"(?mi)^(?=\s*chapter [\divxl]+)", "\n".join(lines)):
            if len(chapter) > 500 and corpus.add("austen", "\n\n".join(paragraphs(chapter))):
                corpus.paragraphs += paragraphs(chapter)


def read_jargon(path: Path, corpus: Corpus) -> None:
    """The Jargon File, an entry to a document."""
    for block in re.split(r"(?m)^(?=\S)", gzip.decompress(path.read_bytes()).decode("utf-8", "replace")):
        head, _, rest = block.partition("\n")
        grammar, _, body = rest.partition("\n")
        entry = grammar.startswith(" ") and body.strip() and not head.startswith("00-")
        if not entry or UNWANTED.search(block):
            continue
        text = paragraphs(re.sub(r"(?m)^    ", "", re.sub(r"\{\s*|\}", "", body)))
        if corpus.add("jargon", "\n\n".join([f"{plain(head)}: {text[0]}", *text[1:]])):
            corpus.definitions.append((plain(head), text[0]))


def read_devil(path: Path, corpus: Corpus) -> None:
    """The Devil's Dictionary, an entry to a document."""
    for block in re.split(
        r"(?m)^(?=[A-Z][A-Z' -]+,? +\(?(?:n|adj|adv|v|x|p|pp)\.)",
        gzip.decompress(path.read_bytes()).decode("utf-8", "replace"),
    )[1:]:
        if UNWANTED.search(block):
            continue
        text = paragraphs(block)
        match = re.match(r"([A-Z][A-Z' -]+),? +\(?[a-z.]+\)?\s+(.*)", text[0])
        if corpus.add("devil", "\n\n".join(text)) and match:
            corpus.definitions.append((match[1].lower(), match[2]))


def read_corpus(root: Path) -> Corpus:
    """Read every source below `root` ('/' when the packages are installed)."""
    jargon, devil = (root / f"usr/share/dictd/{name}.dict.dz" for name in ("jargon", "devil"))
    austen = root / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
    needed = (root / "usr/bin/bible", root / "usr/lib/bible.data", jargon, devil, austen)
    missing = [str(path) for path in needed if not path.exists()]
    if missing:
        sys.exit(
            "train_tiny: text is missing:\n  " + "\n  ".join(missing) + "\n\nIt comes from these Debian "
            f"packages (nothing gets installed):\n\n{GET_TEXT}\n\nThen add: --text-root text"
        )
    corpus = Corpus({"kjv": [], "austen": [], "jargon": [], "devil": []})
    read_bible(root, corpus)
    read_austen(austen, corpus)
    read_jargon(jargon, corpus)
    read_devil(devil, corpus)
    return corpus


def split(corpus: Corpus) -> tuple[list[str], dict[str, list[str]]]:
    """(training documents, held-out documents by source)."""
    train = [doc for docs in corpus.docs.values() for i, doc in enumerate(docs) if i % HOLD_OUT]
    return train, {name: docs[::HOLD_OUT] for name, docs in corpus.docs.items()}
