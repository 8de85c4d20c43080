"""Generate pages of the site when it is built: from other files of the repository, from settings and from commands.

1. README, CHANGELOG, CONTRIBUTING and the examples' pages are copied, and their links are changed to the site's pages.
2. `settings.md` is made from the settings' models, `commands.md` from the commands' own help.
3. `coming-from-slime.md` ends with our equivalents of slime's flags, and with all promises of the documents.
"""

import csv
import os
import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
import mkdocs_gen_files

from agentrl.cli.main import COMMANDS, agentrl
from agentrl.compat.flags import FlagRow, row_of
from agentrl.config.fields import FieldRef, Sections, all_fields
from agentrl.config.inapplicable import EFFECTS, matching

ROOT = Path(__file__).parents[2]
_EXAMPLES = sorted(readme.parent.name for readme in ROOT.glob("examples/*/README.md"))
COPIED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    **{f"examples/{name}/README.md": f"examples/{name}.md" for name in _EXAMPLES},
}
"""Files of the repository, and the site's page for each."""

_LINK = re.compile(r"(?<=\]\()(?![a-z]+:)([^)#\s]+)")


def copied(source: str, target: str) -> str:
    """Return the text of a repository file for the page `target`, and copy the pictures that it shows.

    Raises:
        ValueError: a link leads to a file that is not on the site.
    """

    def on_site(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), found[1]))
        if (ROOT / path).is_dir():
            path += "/README.md"
        page = COPIED.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if page is None and path.endswith((".png", ".svg")):
            page = path
            with mkdocs_gen_files.open(page, "wb") as picture:
                picture.write((ROOT / path).read_bytes())
        if page is None:
            raise ValueError(f"{source}: the link to {found[1]} leads out of the site")
        return posixpath.relpath(page, posixpath.dirname(target) or ".")

    return _LINK.sub(on_site, (ROOT / source).read_text(encoding="utf-8"))


def settings_page() -> Iterator[str]:
    """Return the page of all settings, by section."""
    yield (
        "# Settings\n\nEvery setting is a flag of `agentrl train`, `sft`, `rollout` and `eval`, and a key of a YAML or TOML file "
        "(`--config run.yaml`; without the dashes, with underscores). Flags override the file, and the file overrides defaults. "
        "This page is generated from the settings.\n\nA setting without effect in the run is refused. It is only named in a "
        "note if the same file may serve several commands. `--dry-run` makes the run's checks without a start, and prints "
        "the settings that differ from the defaults. A run that is resumed with other settings lists them. It is refused if "
        "its prompts differ.\n"
    )
    for section, info in Sections.model_fields.items():
        yield f"\n## {info.title}\n"
        yield from (_entry(field) for field in all_fields().values() if field.section == section)


def _entry(field: FieldRef) -> str:
    values = "on or off" if field.is_bool else field.expected()
    facts = _plain(values) + (f"; default {said}" if (said := _default(field)) else "")
    facts += "".join(f". No effect {_plain(effect.why)}" for effect in EFFECTS if field.name in matching(effect.names))
    return f"\n`{field.flag}`{{#{field.name}}}\n:   {_plain(field.info.description or '')}\n    *{facts}*\n"


def _default(field: FieldRef) -> str:
    value = getattr(field.default, "value", field.default)
    if isinstance(value, Mapping):
        return " ".join(f"`{getattr(key, 'value', key)}={getattr(to, 'value', to)}`" for key, to in value.items())
    if field.is_bool and value is not None:
        return "on" if value else "off"
    return "" if value in (None, "", (), [], {}) else f"`{value}`"


def _plain(text: str) -> str:
    """Escape characters that Markdown would read as marks or tags."""
    return re.sub(r"(?<!\\)([*_<{\[`])", r"\\\1", text)


def commands_page() -> Iterator[str]:
    """Return the page with the help text of each command."""
    yield "# Commands\n\nThis page contains the output of `agentrl COMMAND --help`.\n"
    context = click.Context(agentrl, info_name="agentrl", max_content_width=100, terminal_width=100)
    for name in COMMANDS:
        command = agentrl.get_command(context, name)
        assert command is not None
        own = command.context_class(command, parent=context, info_name=name, terminal_width=100, max_content_width=100)
        yield f"\n## agentrl {name}\n\n```text\n{command.get_help(own)}\n```\n"


def read_table(path: str) -> list[dict[str, str]]:
    """Return the rows of a TSV file of the repository as dicts, keyed by the names in its first line."""
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))


def flags_of_slime() -> Iterator[str]:
    """Return the table of our equivalent of each flag of slime and Megatron."""
    yield "\n## Every flag\n\n| flag | here |\n|---|---|\n"
    for row in sorted(read_table("agentrl/compat/flags.tsv"), key=lambda row: row["name"]):
        name, said = _flag(row["name"]), _said(row_of(row["name"]) or FlagRow(**row))
        yield f"| `{name}` | {said.replace('|', '&#124;')} |\n"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _said(row: FlagRow) -> str:
    ours = " ".join(f"`{_flag(word.rpartition('>')[2]).replace('=', ' ')}`" for word in row.target.split())
    match row.state:
        case "same":
            link = f"[the same](settings.md#{row.name})" if row.name in all_fields() else "the same"
            return link + (f"; slime's default is `{row.default}`" if row.default else "")
        case "set" | "called":
            return ours
        case "agrees" if row.target == "config":
            return "as config.json, or the rest of the run, says it"
        case "agrees":
            return f"done anyway: `{row.target}`"
        case "own" | "args":
            return "a hook, or a key that functions find in `args`"
        case "hint":
            one = (
                f"accepted ({', '.join(f'`{word}`' for word in row.target.split())}): " if row.target else "accepted: "
            )
            return one + row.remedy
    return f"refused: {_plain(row.remedy.replace('{it}', 'it'))}"


def promises() -> Iterator[str]:
    """Return the table of everything that the documents promise: its state, its form here, and its evidence."""
    yield (
        "\n## Everything that the documents name\n\nFour documents tell what slime and retrain's backend for it can do. Every item "
        "of theirs: it *works* under its name, *differs* in how it is asked for, is *refused* with a remedy, or is *absent*; and the "
        "test or page that shows it.\n"
    )
    last = ""
    for row in read_table("docs/coming-from-slime.tsv"):
        if row["document"] != last:
            yield f"\n### {row['document']}\n\n| | | | here | shown by |\n|---|---|---|---|---|\n"
        last, words = row["document"], [row[name].replace("|", "&#124;") for name in ("kind", "item", "state", "here")]
        proof = (
            f"[{row['proof']}]({row['proof'].removeprefix('docs/')})"
            if row["proof"].startswith("docs/")
            else f"`{row['proof']}`"
        )
        yield f"| {' | '.join([_plain(words[0]), _plain(words[1]), words[2], words[3]])} | {proof} |\n"


def main() -> None:
    """Write all pages."""
    os.chdir(ROOT)
    for source, target in COPIED.items():
        with mkdocs_gen_files.open(target, "w") as page:
            page.write(copied(source, target))
    for target, parts in (("settings.md", settings_page()), ("commands.md", commands_page())):
        with mkdocs_gen_files.open(target, "w") as page:
            page.writelines(parts)
    with mkdocs_gen_files.open("coming-from-slime.md", "a") as page:
        page.writelines((*flags_of_slime(), *promises()))


main()
