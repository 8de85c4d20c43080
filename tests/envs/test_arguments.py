"""Arguments of environments: converted by the class's type hints, or refused with the accepted arguments."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
from pydantic import Field

from agentrl.config import Args
from agentrl.envs import EnvClasses, Environment, Environments, EnvSpec
from agentrl.envs.load import read_arguments
from agentrl.errors import AgentRLError, PluginError
from agentrl.sample import Sample


@dataclass
class Place:
    x: int
    y: int = 0


class Maze(Environment):
    def __init__(
        self,
        size: int,
        name: str = "maze",
        walls: tuple[Place, ...] = (),
        *,
        odds: Annotated[float, Field(le=1)] = 0.5,
        folder: Path = Path("."),
        other: Any = None,
    ) -> None:
        self.got = (size, name, walls, odds, folder, other)


def test_arguments_have_the_types_of_their_hints() -> None:
    given = {"size": "3", "walls": [{"x": 1}, {"x": 2, "y": 3}], "odds": 1, "folder": "data", "other": {"a": [1]}}
    read = read_arguments(Maze, given)
    assert Maze(**read).got == (3, "maze", (Place(1), Place(2, 3)), 1.0, Path("data"), {"a": [1]})
    assert type(read["odds"]) is float


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, r"Maze.__init__ needs size; give --env-args size=\.\.\."),
        ({"size": "big"}, "Maze's argument size: .*valid integer.*; got 'big'"),
        ({"size": 1, "naem": "x"}, "Maze has no argument 'naem'; did you mean name?"),
        ({"size": 1, "zzz": 1}, "no argument 'zzz'; it takes size, name, walls, odds, folder, other"),
        ({"size": 1, "name": 1.1}, r"argument name: .*valid string; got 1\.1; in quotes it is text: name='\"1\.1\"'"),
        ({"size": 1, "odds": 2}, "argument odds: .*less than or equal to 1; got 2"),
        ({"size": 1, "walls": [{"x": 1}, {"y": 1}]}, r"argument walls\[1\]\['x'\]: Field required"),
    ],
)
def test_wrong_arguments(given: Mapping[str, Any], said: str) -> None:
    with pytest.raises(PluginError, match=said):
        read_arguments(Maze, given)


def test_a_class_without_init_takes_none_and_one_with_kwargs_any() -> None:
    class Open(Environment):
        def __init__(self, **more: int) -> None:
            self.more = more

    with pytest.raises(PluginError, match="Environment has no argument 'a'; it takes none"):
        read_arguments(Environment, {"a": 1})
    assert read_arguments(Open, {"a": "x"}) == {"a": "x"}


ENVS = """
from agentrl import Environment


class Sized(Environment):
    opened: list = []

    def __init__(self, size: int = 1) -> None:
        self.size = size

    @classmethod
    async def setup(cls, args):
        cls.shared = args.env_args


class Other(Environment):
    pass
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "sized.py").write_text(ENVS)
    return tmp_path / "sized.py"


async def test_what_setup_keeps_on_a_class_is_that_of_its_own_arguments(file: Path) -> None:
    paths = {"easy": f"{file}:Sized", "hard": f"{file}:Sized", "other": f"{file}:Other"}
    found = Environments.load(paths, {"easy": {"size": "2"}, "hard": {"size": 9}}, Args({"env": paths, "seed": 1}))
    for entry in found.values():
        await entry.kind.setup(entry.args)
    easy, hard = (found[name].make() for name in ("easy", "hard"))
    assert [(env.size, env.shared) for env in (easy, hard)] == [(2, {"size": 2}), (9, {"size": 9})]  # type: ignore[attr-defined]
    assert type(easy).__name__ == type(hard).__name__ == "Sized"
    assert found["hard"].args.env == paths["hard"]
    assert found["hard"].args.seed == 1


LIMITED = """
from agentrl import Environment


class Base(Environment):
    limit = 10


class Limited(Base):
    def __init__(self, limit: int = 0) -> None:
        pass

    @classmethod
    async def setup(cls, args):
        await super().setup(args)
        if "limit" in args.env_args:
            cls.limit = cls.max_turns = args.env_args["limit"]
"""


async def test_a_use_does_not_inherit_what_setup_set_for_another(tmp_path: Path) -> None:
    (tmp_path / "limited.py").write_text(LIMITED)
    paths = dict.fromkeys(("short", "long"), f"{tmp_path}/limited.py:Limited")
    found = Environments.load(paths, {"short": {"limit": 2}}, Args({"env": paths}))
    for entry in found.values():
        await entry.kind.setup(entry.args)
    kinds: list[Any] = [found[name].kind for name in ("short", "long")]
    assert [kind.max_turns for kind in kinds] == [2, 8]
    # Data that a class keeps by its own name are of all uses.
    kinds[0].words = ["one"]
    assert kinds[1].words == ["one"]


def test_each_instance_has_arguments_of_its_own() -> None:
    entry = EnvSpec(Maze, None, read_arguments(Maze, {"size": 1, "walls": [{"x": 1}], "other": ["a", "b"]}))
    one, two = entry.make(), entry.make()
    assert isinstance(one, Maze)
    assert isinstance(two, Maze)
    one.got[2][0].x = 5
    one.got[5].pop()
    lock = threading.Lock()
    assert EnvSpec(Maze, None, {"size": 1, "other": lock}).make().got[5] is lock  # type: ignore[attr-defined]
    assert two.got == entry.make().got == (1, "maze", (Place(1),), 0.5, Path("."), ["a", "b"])  # type: ignore[attr-defined]


def test_a_class_with_the_same_arguments_is_there_once(file: Path) -> None:
    kinds, args = EnvClasses(), Args({})
    one, two, third = (Environments.load(f"{file}:Sized", {"size": n}, args, kinds)[""].kind for n in (1, 1, 2))
    assert one is two
    assert third is not one
    assert issubclass(third, one)


def test_a_sample_says_which_of_several_plays_it(file: Path) -> None:
    found = Environments.load({"a": f"{file}:Sized", "b": f"{file}:Other"}, {}, Args({}))
    assert found.names == ("a", "b")
    assert found.of(Sample(metadata={"env": "b"})) is found["b"]
    with pytest.raises(AgentRLError, match="several environments, a, b, and the row names 'c'"):
        found.of(Sample(metadata={"env": "c"}))
    with pytest.raises(AgentRLError, match="the row names none"):
        found.of(Sample())
    alone = Environments.alone(Environment)
    assert alone.names == ()
    assert alone.of(Sample(metadata={"env": "the row's own"})).kind is Environment


@pytest.mark.parametrize(
    ("env", "given", "said"),
    [
        ("Sized", {"siz": 1}, "^--env-args: Sized has no argument 'siz'; did you mean size"),
        ({"a": "Sized"}, {"b": {}}, r"^--env-args b: with several environments .*\(a\).*a='\{"),
        ({"a": "Sized"}, {"a": 3}, "^--env-args a: with several environments"),
        ({"a": "Sized"}, {"a": {"size": "x"}}, "^--env-args a: Sized's argument size"),
        ({"a": "Sizet"}, {}, "^--env a .*did you mean 'Sized'"),
    ],
)
def test_the_flag_is_named(file: Path, env: Any, given: Mapping[str, Any], said: str) -> None:
    paths = f"{file}:{env}" if isinstance(env, str) else {name: f"{file}:{cls}" for name, cls in env.items()}
    with pytest.raises(AgentRLError, match=said):
        Environments.load(paths, given, Args({}))


def test_an_instance_knows_whether_it_is_evaluated() -> None:
    args = SimpleNamespace()
    entry = Environments.alone(Environment, args)[""]
    assert entry.make(evaluating=True).evaluating
    assert not entry.make().evaluating
    assert entry.make().args is args


def test_init_reads_the_settings_and_whether_it_is_evaluated() -> None:
    class Quiz(Environment):
        def __init__(self, hints: bool = True) -> None:
            self.seen = (hints and not self.evaluating, self.args.seed)

    entry = EnvSpec(Quiz, SimpleNamespace(seed=3), {"hints": True})
    assert [entry.make(evaluating=flag).seen for flag in (False, True)] == [(True, 3), (False, 3)]  # type: ignore[attr-defined]
