"""The page of claims, docs/experiments/claims.md: every claim with our verdict, by paper and experiment."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from bayesify_papers import status
from bayesify_papers.catalog import PAPERS

from tools.markdown import table
from tools.paper_claims.reading import prose

INTRO = """# Claims of the papers

*For readers who want to know which claims of the papers hold in our runs.*

Most claims of a paper are rankings: one system is better than another. This page lists the rankings that five papers state in
their texts, captions and tables, and findings that the papers show in figures. Each claim has a verdict from our stored results:

- *Not shown*: our numbers contradict the claim. The known or probable cause follows, and often the cheapest run that would test
  this cause.
- *Untested*: we did not run an experiment that could decide the claim, or we ran only some of the systems or data sets.
- *Shown*: our numbers agree with the claim in our setting, which may differ from the paper's setting. Many claims were checked
  with a single seed. We did not test for significance.

How a ranking is judged:

- A comparison takes the stored means of two systems on the same data. The systems may be trained differently, for example for
  different numbers of epochs. The text above the claims says so. A comparison holds if the system that the claim prefers has the
  strictly better mean. If the claim names a margin, this mean may be worse by at most the margin.
- A claim is shown if all its comparisons hold. If a claim says "most", more than half of its comparisons must hold.
- If we did not run some comparisons of the paper, a claim is shown only if it would hold even if they all failed. Otherwise it is
  untested. A claim that fails on the comparisons that we ran is not shown.
- If a claim has several settings, the setting nearest to the paper's counts. The others are marked *our setting*: another network,
  context, selection rule or prior. They are counted apart, in the last column of the next table.
- Where a paper says only "similar" or "slightly", we chose the margin.
- We apply the same rule to the numbers that the paper prints. The word "only" before such a count, as in "only 2 of 5", says that
  the paper's own numbers do not show the claim.
- In a table below a claim, "4 of 5" means that 4 of 5 comparisons hold. The column *ours* is for our runs, and the column *paper*
  is for the paper's own numbers.
- The words "our data differ", "our images differ", "our network differs" or "our context differs" after a figure or table mean
  that our runs use other data, images, networks or context inputs.

Each experiment begins with the compared numbers and their setting. Claims that are not shown come first, then untested
claims, then shown claims. `python -m tools.every_table` writes this page from `papers/results` and the list of claims in
`tools/every_table.toml`. This program computes the verdicts and the numbers. The causes are written by hand.
"""
Entry = Mapping[str, Any]


def claims_page(content: Mapping[str, Sequence[Entry]], above: Mapping[tuple[str, str], str]) -> str:
    """The page of claims. In each experiment, claims that are not shown come first.

    Args:
        content: Content of `papers/tables.json`.
        above: Text above the claims of a paper and experiment. The text of a paper has an empty experiment.
    """
    own = content["figures"]
    parts = [INTRO, _counts(own)]
    for paper, title in PAPERS.items():
        parts.append(f"## {title}: {paper.replace('-', ' ')}\n")
        if text := above.get((paper, "")):
            parts.append(f"{text}\n")
        for experiment in status.EXPERIMENTS[paper]:
            mine = [one for one in own if (one["paper"], one["experiment"]) == (paper, experiment)]
            parts.append(f"### {_capital(experiment)}\n")
            if text := above.get((paper, experiment)):
                parts.append(f"{text}\n")
            parts += _listed(mine)
    return "\n".join(parts)


def _counts(own: Sequence[Entry]) -> str:
    """A table of the verdicts of each paper."""
    lines = []
    for title, papers in [*((title, [paper]) for paper, title in PAPERS.items()), ("all", list(PAPERS))]:
        mine = [one for one in own if one["paper"] in papers and not one["variant"]]
        ours = [one for one in own if one["paper"] in papers and one["variant"]]
        counts = [
            [str(sum(one["shown"] is shown for one in part)) for shown in status.VERDICTS] for part in (mine, ours)
        ]
        lines.append([title, *counts[0], str(len(mine)), " / ".join(counts[1]) if ours else ""])
    header = ["paper", *status.VERDICTS.values(), "all", f"our settings: {' / '.join(status.VERDICTS.values())}"]
    return table(header, lines) + "\n"


def _listed(claims: Sequence[Entry]) -> list[str]:
    """Items of a list. Claims that differ only in their setting share an item, with lines below it for the settings."""
    groups: dict[str, list[Entry]] = {}
    for one in claims:
        groups.setdefault(one["title"], []).append(one)
    ordered = sorted(groups.items(), key=lambda item: min(map(_place, item[1])))
    return [_item(title, sorted(own, key=_place)) for title, own in ordered]


def _place(one: Entry) -> int:
    return list(status.VERDICTS).index(one["shown"])


def _item(title: str, own: Sequence[Entry]) -> str:
    head = f"- **{_capital(title)}** ({_figures(sorted({one['figure'] for one in own}))})"
    alike: dict[tuple[bool | None, bool, str], list[Entry]] = {}
    causes: dict[str, list[Entry]] = {}
    for one in own:
        alike.setdefault((one["shown"], one["variant"], _told(one)), []).append(one)
        if one["cause"]:
            causes.setdefault(one["cause"], []).append(one)
    groups = list(alike.values())
    if len(groups) == 1:
        return f"{head}. {_verdict(own)} {_cause(own[0]['cause'])}".rstrip() + "\n"
    if len(groups) >= MIN_ROWS and all(one["brief"] for one in own):
        below = [_table(groups)]
        below += [_cause(cause, _settings(about) if len(about) < len(own) else ()) for cause, about in causes.items()]
        return "\n\n".join([head, *(_indented(part) for part in below)]) + "\n"
    lines = []
    for group in groups:
        cause = group[0]["cause"]
        alone = cause and causes[cause] == group
        lines.append(f"{_verdict(group)} {_cause(cause)}" if alone else _verdict(group))
    lines += [_cause(cause, _settings(about)) for cause, about in causes.items() if about not in groups]
    return "\n".join([f"{head}\n", *(f"    - {line}\n" for line in lines)])


def _figures(names: Sequence[str]) -> str:
    """Places in a paper. "Table 7" and "Table 8" become "Tables 7 and 8"."""
    kind = names[0].partition(" ")[0]
    if len(names) > 1 and all(re.fullmatch(rf"{kind} \d+", name) for name in names):
        return f"{kind}s {_joined([name.partition(' ')[2] for name in names])}"
    return _joined(names)


MIN_ROWS = 2
"""Smallest number of different outcomes of a ranking that are printed as a table."""


def _table(groups: Sequence[Sequence[Entry]]) -> str:
    """A table of the verdicts on a ranking in several settings."""
    other = next((one["brief"]["other"][0] for group in groups for one in group if one["brief"]["other"]), None)
    rows = []
    for group in groups:
        brief = group[0]["brief"]
        remark = [
            f"fails {brief['fails']}" if brief["fails"] else "",
            f"not run: {brief['not_run'].replace(' or ', ' and ')}" if brief["not_run"] and not brief["remark"] else "",
            f"not run {brief['unrun']}" if brief["unrun"] else "",
            brief["remark"] or "",
        ]
        rows.append(
            [
                _joined(_settings(group)),
                _word(group[0]),
                brief["ours"] or "",
                *([brief["other"][1] if brief["other"] else ""] if other else []),
                brief["paper"] or "",
                "; ".join(part for part in remark if part),
            ]
        )
    header = ["setting", "verdict", "ours", *([other] if other else []), "paper", "remark"]
    kept = [place for place in range(len(header)) if any(row[place] for row in rows)]
    return table([header[place] for place in kept], [[row[place] for place in kept] for row in rows])


def _settings(own: Sequence[Entry]) -> list[str]:
    return [one["setting"] for one in own if one["setting"]]


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _verdict(alike: Sequence[Entry]) -> str:
    """The verdict on a claim, in settings with the same outcome, and its numbers."""
    settings = _settings(alike)
    word, told = _capital(_word(alike[0])), _told(alike[0])
    return f"*{word}* for {_joined(settings)}: {_small(told)}" if settings else f"*{word}.* {told}"


def _word(one: Entry) -> str:
    """The verdict in words, with a mark if the setting is ours and the paper's setting is counted elsewhere."""
    return f"{status.VERDICTS[one['shown']]}{' (our setting)' * one['variant']}"


def _told(one: Entry) -> str:
    """The numbers of a check, or the comparisons of a ranking, in sentences."""
    brief = one["brief"]
    if brief is None:
        return str(one["reason"])
    words = {
        "ours": "{} comparisons hold",
        "fails": "The claim fails {}",
        "not_run": "We did not run {}",
        "unrun": "At least one run is missing {}",
        "remark": "{}",
        "paper": "In the paper, {} comparisons hold",
    }
    told = {key: text.format(brief[key]) for key, text in words.items() if brief[key]}
    if "remark" in told:  # which says why nothing was run
        told.pop("not_run", None)
    if brief["other"]:
        name, held = brief["other"]
        mixed = _plain(f"With the {name}, {held} comparisons hold")
        told["not_run"] = ". ".join(part for part in (mixed, told.get("not_run")) if part)
    return prose(*(_plain(told[key]) for key in words if key in told))


def _plain(text: str) -> str:
    """A count of comparisons in plain words."""
    text = re.sub(r"( \(.*? that we ran\)) comparisons hold", r" comparisons hold\1", text)
    text = re.sub(r"\b(\d+) of \1 comparisons hold", lambda found: _all(int(found[1])), text)
    text = text.replace("0 of 1 comparisons hold", "the comparison does not hold")
    return re.sub(r"\b1 of (\d+) comparisons hold\b", r"1 of \1 comparisons holds", text)


def _all(count: int) -> str:
    return {1: "the comparison holds", 2: "both comparisons hold"}.get(count, f"all {count} comparisons hold")


def _cause(cause: str | None, settings: Sequence[str] = ()) -> str:
    """The cause of an entry, with its labels in italics. If it is the cause in several settings, the first label names them."""
    text = re.sub(r"\b(Cause|Probable cause|Part of the cause|Test):", r"*\1:*", cause or "")
    if not settings:
        return text
    place = f"for {_joined(settings)}"
    if text.startswith("*"):
        return text.replace(":*", f"* {place}:", 1)
    return f"{_capital(place)}, {text[0].lower()}{text[1:]}"


def _joined(names: Sequence[str]) -> str:
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def _small(text: str) -> str:
    """A text that follows a colon. Names and abbreviations keep their capital."""
    first = text.split(maxsplit=1)[0]
    return text[0].lower() + text[1:] if first in ("All", "Both", "The", "We", "No", "Inducing") else text


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
