"""The page as one script and one style sheet: a browser loads no modules from disk, and asks a server once.

The modules of assets/ keep to one form of import and export, so a module becomes a function that returns what it
exports, and an import becomes names taken from that.
"""

import re
from pathlib import Path

from mopd_dataplane.errors import InputError

ASSETS = Path(__file__).parent / "assets"
ENTRY = "main"
_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async function|function|class|const|let) (\w+))", re.MULTILINE)
_AGAIN = re.compile(r"^export \{([^}]*)\};$", re.MULTILINE)


def script(folder: Path = ASSETS) -> str:
    """uPlot and every module that the entry needs, in the order in which they need each other.

    Raises InputError for a module that imports or exports in another form.
    """
    parts = [(folder / "vendor" / "uPlot.iife.min.js").read_text()]
    done: list[str] = []
    _add(folder, ENTRY, done, parts, ())
    return "\n".join(parts)


def style() -> str:
    """All style sheets."""
    return (ASSETS / "vendor" / "uPlot.min.css").read_text() + "\n" + (ASSETS / "view.css").read_text()


def _add(folder: Path, name: str, done: list[str], parts: list[str], above: tuple[str, ...]) -> None:
    if name in above:
        raise InputError(f"modules import each other in a circle: {' -> '.join([*above, name])}")
    if name in done:
        return
    text = (folder / f"{name}.js").read_text()
    for _, needed in _IMPORT.findall(text):
        _add(folder, needed, done, parts, (*above, name))
    names = list(_EXPORT.findall(text))
    names += [word.strip() for group in _AGAIN.findall(text) for word in group.split(",")]
    text = _IMPORT.sub(lambda match: f"const {{{match[1]}}} = of_{match[2]};", text)
    text = _AGAIN.sub("", _EXPORT.sub("", text))
    if re.search(r"^(import|export)\b", text, re.MULTILINE):
        raise InputError(f"{name}.js imports or exports in a form that an export cannot carry")
    parts.append(f"const of_{name} = (() => {{\n{text}\nreturn {{{', '.join(names)}}};\n}})();")
    done.append(name)
