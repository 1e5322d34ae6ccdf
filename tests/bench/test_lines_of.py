"""Lines of the vLLM engine by part."""

from __future__ import annotations

import re


def test_each_module_is_in_one_part() -> None:
    from lines_of import FOLDER, PARTS, ROOT, part_of

    names = [name for part in PARTS.values() for name in part.split()]
    assert len(set(names)) == len(names)
    for path in (ROOT / FOLDER).glob("*.py"):
        assert part_of(path.stem), path


def test_the_table_of_the_page_adds_up_and_has_its_parts() -> None:
    from lines_of import PARTS, ROOT, table

    page = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^\| lines of .*\n(?:\|.*\n)+", page, re.MULTILINE)
    head, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines())
    numbers = {name: [int(text.replace(",", "")) for text in texts] for name, *texts in rows}
    columns = {commit: {part: numbers[part][place] for part in PARTS} for place, commit in enumerate(head[1:])}
    assert table(columns) == shown.rstrip("\n")
