"""Twenty kinds of bugs: a correct module, the line that breaks it, the complaint of a user, and calls with random arguments."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Bug:
    """A planted bug.

    Attributes:
        module: name of the module, without `.py`.
        source: the correct text of the module.
        right: a part of `source`, which occurs once.
        wrong: the text that replaces it in the repository.
        complaint: what a user reports.
        call: makes an expression that calls the module's functions.
    """

    module: str
    source: str
    right: str
    wrong: str
    complaint: str
    call: Callable[[Random], str]

    @property
    def broken(self) -> str:
        """Return the module with its bug."""
        assert self.source.count(self.right) == 1, self.module
        return self.source.replace(self.right, self.wrong)


VALUES, CELLS = ("1", "x y", "a=b", ""), ("a", '"b,c"', '"d""e"', "")


def _ints(rng: Random, most: int = 6, top: int = 20) -> list[int]:
    return [rng.randrange(top) for _ in range(rng.randrange(1, most))]


def _words(rng: Random, most: int = 7) -> str:
    return " ".join(rng.choice(("a", "tree", "of", "seven", "longer", "words")) for _ in range(rng.randrange(1, most)))


def _spans(rng: Random) -> list[tuple[int, int]]:
    starts = [rng.randrange(15) for _ in range(rng.randrange(1, 5))]
    return [(start, start + rng.randrange(1, 5)) for start in starts]


def _graph(rng: Random) -> dict[str, list[str]]:
    return {name: sorted(rng.sample("abcde", rng.randrange(4))) for name in "abcde"}


def _weights(rng: Random) -> dict[str, dict[str, int]]:
    return {name: {to: rng.randrange(1, 9) for to in sorted(rng.sample("abcd", 2)) if to != name} for name in "abcd"}


def _sum(rng: Random) -> str:
    return "".join(f"{rng.randrange(1, 9)}{rng.choice('+-*')}" for _ in range(3)) + str(rng.randrange(1, 9))


BUGS = (
    Bug(
        "spans",
        '''"""Half-open spans of whole numbers."""


def merge(spans):
    """Merge spans that overlap or touch."""
    merged = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
''',
        "max(end, merged[-1][1])",
        "end",
        "merge() loses the end of a long span if a short span lies inside it.",
        lambda rng: f"merge({_spans(rng)})",
    ),
    Bug(
        "busy",
        '''"""Times that are taken."""


def overlaps(first, second):
    """Return whether two half-open spans share a number."""
    return first[0] < second[1] and second[0] < first[1]


def conflicts(spans):
    """Count the pairs of spans that overlap."""
    return sum(overlaps(a, b) for i, a in enumerate(spans) for b in spans[i + 1 :])
''',
        "first[0] < second[1]",
        "first[0] <= second[1]",
        "Spans that only touch are reported as conflicts.",
        lambda rng: f"conflicts({_spans(rng)})",
    ),
    Bug(
        "recent",
        '''"""A cache that drops the entry that was not used for the longest time."""


class Recent:
    def __init__(self, size):
        self.size = size
        self.entries = {}

    def get(self, key):
        if key not in self.entries:
            return None
        value = self.entries.pop(key)
        self.entries[key] = value
        return value

    def put(self, key, value):
        self.entries.pop(key, None)
        self.entries[key] = value
        if len(self.entries) > self.size:
            del self.entries[next(iter(self.entries))]


def replay(size, keys):
    """Ask for each key, and put it if it is absent. Return the hits and the keys left."""
    cache, hits = Recent(size), 0
    for key in keys:
        if cache.get(key) is not None:
            hits += 1
        else:
            cache.put(key, True)
    return hits, list(cache.entries)
''',
        "value = self.entries.pop(key)\n        self.entries[key] = value\n        return value",
        "return self.entries[key]",
        "The cache drops an entry that was read a moment ago.",
        lambda rng: f"replay({rng.randrange(2, 4)}, {[rng.randrange(5) for _ in range(rng.randrange(1, 12))]})",
    ),
    Bug(
        "expiry",
        '''"""A cache whose entries expire."""


def alive(entries, now, lifetime):
    """Return the names of entries (name: time of writing) younger than `lifetime`."""
    return sorted(name for name, written in entries.items() if now - written < lifetime)
''',
        "now - written < lifetime",
        "now - written <= lifetime",
        "An entry is still served at the moment at which its lifetime is over.",
        lambda rng: f"alive({ {name: rng.randrange(8) for name in 'abcd'} }, 10, {rng.randrange(2, 9)})",
    ),
    Bug(
        "wrapping",
        '''"""Lines of limited width."""


def wrap(text, width):
    """Break a text at spaces into lines of at most `width` characters; longer words get their own line."""
    lines = []
    for word in text.split():
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += " " + word
        else:
            lines.append(word)
    return lines
''',
        "len(lines[-1]) + 1 + len(word)",
        "len(lines[-1]) + len(word)",
        "wrap() makes lines that are one character too long.",
        lambda rng: f"wrap({_words(rng)!r}, {rng.randrange(4, 14)})",
    ),
    Bug(
        "columns",
        '''"""Tables of plain text."""


def align(rows):
    """Pad each cell to the width of its column, and join cells with two spaces."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
''',
        "max(len(cell) for cell in column)",
        "len(column[0])",
        "Columns are not aligned if a later row has a longer cell.",
        lambda rng: f"align({[rng.choices(('a', 'bb', 'cccc'), k=3) for _ in range(rng.randrange(1, 4))]})",
    ),
    Bug(
        "leap",
        '''"""The calendar."""


def is_leap(year):
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def days_in(year, month):
    """Return the number of days of a month."""
    if month == 2:
        return 29 if is_leap(year) else 28
    return 30 if month in (4, 6, 9, 11) else 31
''',
        "(year % 100 != 0 or year % 400 == 0)",
        "year % 100 != 0",
        "February of some years has a day too few.",
        lambda rng: f"days_in({rng.choice((1600, 2000, 2400, 1900, rng.randrange(1901, 2099)))}, 2)",
    ),
    Bug(
        "months",
        '''"""Dates as (year, month)."""


def add(year, month, count):
    """Return the month `count` months later; `count` may be negative."""
    years, index = divmod(year * 12 + month - 1 + count, 12)
    return years, index + 1
''',
        "years, index = divmod(year * 12 + month - 1 + count, 12)\n    return years, index + 1",
        "total = month + count\n    return year + total // 12, total % 12",
        "Some months have the number 0.",
        lambda rng: f"add({rng.randrange(1990, 2030)}, {rng.randrange(1, 13)}, {rng.randrange(-30, 30)})",
    ),
    Bug(
        "routes",
        '''"""Routes with the fewest edges."""


def distance(graph, start, goal):
    """Return the number of edges of the shortest path, or None."""
    queue, seen = [(start, 0)], {start}
    while queue:
        node, far = queue.pop(0)
        if node == goal:
            return far
        for follower in graph.get(node, ()):
            if follower not in seen:
                seen.add(follower)
                queue.append((follower, far + 1))
    return None
''',
        "queue.pop(0)",
        "queue.pop()",
        "distance() is sometimes longer than the shortest path.",
        lambda rng: f"distance({_graph(rng)}, 'a', 'e')",
    ),
    Bug(
        "costs",
        '''"""Routes with the lowest cost."""

import heapq


def cheapest(graph, start, goal):
    """Return the lowest sum of weights from start to goal, or None."""
    heap, done = [(0, start)], set()
    while heap:
        cost, node = heapq.heappop(heap)
        if node == goal:
            return cost
        if node in done:
            continue
        done.add(node)
        for follower, weight in graph.get(node, {}).items():
            heapq.heappush(heap, (cost + weight, follower))
    return None
''',
        "(cost + weight, follower)",
        "(weight, follower)",
        "The cost of a path is that of its last edge alone.",
        lambda rng: f"cheapest({_weights(rng)}, 'a', 'd')",
    ),
    Bug(
        "order",
        '''"""The order in which tasks can run."""


def schedule(needs):
    """Return tasks (name: names that it needs), each after what it needs. Raises ValueError: a circle."""
    done, active = [], set()

    def visit(name):
        if name in done:
            return
        if name in active:
            raise ValueError(f"{name} needs itself")
        active.add(name)
        for need in sorted(needs.get(name, ())):
            visit(need)
        done.append(name)

    for name in sorted(needs):
        visit(name)
    return done
''',
        'raise ValueError(f"{name} needs itself")',
        "return",
        "A circle of tasks is accepted.",
        lambda rng: f"schedule({_graph(rng)})",
    ),
    Bug(
        "pairs",
        '''"""Settings as text."""


def parse(text):
    """Read `name=value` pairs that semicolons separate. A value may contain `=`. Empty parts are skipped."""
    found = {}
    for part in text.split(";"):
        if part.strip():
            name, _, value = part.partition("=")
            found[name.strip()] = value.strip()
    return found
''',
        "part.partition",
        "part.rpartition",
        "A value that contains an equals sign is cut, and its name is wrong.",
        lambda rng: f"parse({'; '.join(name + '=' + rng.choice(VALUES) for name in 'kmn')!r})",
    ),
    Bug(
        "quoted",
        '''"""One line of a CSV file."""


def split(line):
    """Split at commas outside of double quotes. Two quotes inside of quotes are one quote."""
    cells, cell, inside, at = [], "", False, 0
    while at < len(line):
        char = line[at]
        if char == '"' and inside and line[at + 1 : at + 2] == '"':
            cell, at = cell + '"', at + 1
        elif char == '"':
            inside = not inside
        elif char == "," and not inside:
            cells, cell = [*cells, cell], ""
        else:
            cell += char
        at += 1
    return [*cells, cell]
''',
        'char == "," and not inside',
        'char == ","',
        "A comma in quotes splits a cell.",
        lambda rng: f"split({','.join(rng.choice(CELLS) for _ in range(rng.randrange(1, 4)))!r})",
    ),
    Bug(
        "formulas",
        '''"""Sums and products of digits."""


def evaluate(text):
    """Compute a formula of one-digit numbers, +, - and *, from left to right, with products first."""
    total, sign, at = 0, 1, 0
    while at < len(text):
        product = int(text[at])
        while text[at + 1 : at + 2] == "*":
            product *= int(text[at + 2])
            at += 2
        total += sign * product
        sign = -1 if text[at + 1 : at + 2] == "-" else 1
        at += 2
    return total
''',
        'total += sign * product\n        sign = -1 if text[at + 1 : at + 2] == "-" else 1',
        'total += sign * product\n        sign = -sign if text[at + 1 : at + 2] == "-" else sign',
        "After a minus, a plus is computed as a minus.",
        lambda rng: f"evaluate({_sum(rng)!r})",
    ),
    Bug(
        "versions",
        '''"""Version numbers."""


def newest(versions):
    """Return the highest of versions such as 1.10.2."""
    return max(versions, key=lambda version: [int(part) for part in version.split(".")])
''',
        '[int(part) for part in version.split(".")]',
        'version.split(".")',
        "Version 1.9 counts as newer than version 1.10.",
        lambda rng: f"newest({[f'1.{rng.randrange(1, 15)}.{rng.randrange(3)}' for _ in range(3)]})",
    ),
    Bug(
        "defaults",
        '''"""Lists of labels."""


def label(name, labels=None):
    """Return `labels` and the new name, in a new list."""
    return [*(labels or []), name]


def labelled(names):
    """Label each name on its own, and return all lists."""
    return [label(name) for name in names]
''',
        '''labels=None):
    """Return `labels` and the new name, in a new list."""
    return [*(labels or []), name]''',
        '''labels=[]):
    """Return `labels` and the new name, in a new list."""
    labels.append(name)
    return labels''',
        "Labels of earlier calls come back in later calls.",
        lambda rng: f"label('x', {_words(rng).split()})" if rng.random() < 0.5 else f"labelled({_words(rng).split()})",
    ),
    Bug(
        "searching",
        '''"""Search in sorted lists."""


def position(numbers, wanted):
    """Return the first index at which `wanted` could be inserted into a sorted list."""
    low, high = 0, len(numbers)
    while low < high:
        middle = (low + high) // 2
        if numbers[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low
''',
        "numbers[middle] < wanted",
        "numbers[middle] <= wanted",
        "Of equal numbers the search does not find the first.",
        lambda rng: f"position({sorted(_ints(rng, 8, 6))}, {rng.randrange(6)})",
    ),
    Bug(
        "pages",
        '''"""Lists in pages."""


def pages(items, size):
    """Split a list into pages of `size`; the last page may be shorter."""
    return [items[at : at + size] for at in range(0, len(items), size)]
''',
        "range(0, len(items), size)",
        "range(0, len(items) - size + 1, size)",
        "The last items are missing if they do not fill a page.",
        lambda rng: f"pages({_ints(rng, 9)}, {rng.randrange(1, 5)})",
    ),
    Bug(
        "statistics_of",
        '''"""Figures of lists."""


def median(numbers):
    """Return the middle number, or the mean of the two in the middle."""
    ordered = sorted(numbers)
    half = len(ordered) // 2
    if len(ordered) % 2:
        return float(ordered[half])
    return (ordered[half - 1] + ordered[half]) / 2
''',
        "ordered = sorted(numbers)",
        "ordered = list(numbers)",
        "The median depends on the order of the numbers.",
        lambda rng: f"median({_ints(rng)})",
    ),
    Bug(
        "money",
        '''"""Amounts in cents."""


def split_bill(cents, people):
    """Split an amount; the first people pay one cent more if it cannot be divided."""
    share, rest = divmod(cents, people)
    return [share + (index < rest) for index in range(people)]
''',
        "share + (index < rest)",
        "share",
        "The shares do not add up to the amount.",
        lambda rng: f"split_bill({rng.randrange(1, 200)}, {rng.randrange(1, 6)})",
    ),
)
