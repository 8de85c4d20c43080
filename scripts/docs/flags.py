"""MkDocs hook: link each flag that a page names to its entry on the settings page."""

import re
from typing import Any

from agentrl.config.fields import all_fields

_FLAG = re.compile(r"<code>(--[a-z][\w-]*)([^<]*)</code>")
_LINKED = re.compile(r"<(a|h[1-6])\b.*?</\1>", re.DOTALL)
_TARGETS = {field.flag: name for name, field in all_fields().items()}
_TARGETS |= {f"--no-{field.flag[2:]}": name for name, field in all_fields().items() if field.is_bool}


def on_page_content(content: str, *, page: Any, **_: Any) -> str:
    """Add the links to a page's HTML; MkDocs calls this. Existing links and headings do not change."""
    if page.file.src_uri in ("settings.md", "commands.md"):
        return content
    up = "../" * page.file.src_uri.count("/")

    def linked(found: re.Match[str]) -> str:
        target = _TARGETS.get(found[1])
        return found[0] if target is None else f'<a class="flag" href="{up}settings.html#{target}">{found[0]}</a>'

    parts, at = [], 0
    for kept in _LINKED.finditer(content):
        parts += [_FLAG.sub(linked, content[at : kept.start()]), kept[0]]
        at = kept.end()
    return "".join([*parts, _FLAG.sub(linked, content[at:])])
