"""Functions, classes and modules as a user's own file defines them, to be shipped."""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

SCALE = 3
TEXT = """
no indentation
    four
"""


def scaled(x: Tensor) -> Tensor:
    """Uses a name of its module."""
    return x * SCALE


def twice(x: Tensor) -> Tensor:
    """Calls another function of its module."""
    return scaled(scaled(x))


def factorial(n: int) -> int:
    """Calls itself."""
    return 1 if n < 2 else n * factorial(n - 1)


def even(n: int) -> bool:
    """Calls a function that calls it."""
    return n == 0 or odd(n - 1)


def odd(n: int) -> bool:
    """Calls a function that calls it."""
    return n != 0 and even(n - 1)


def text() -> str:
    """Holds a text over several lines, and one of its module."""
    inner = """
  two
six"""
    return TEXT + inner


def adder(amount: int) -> Callable[[int], int]:
    """Gives back a closure."""

    def add(x: int) -> int:
        return x + amount

    return add


def counter() -> Callable[[], int]:
    """Gives back a closure with a state."""
    count = 10

    def bump() -> int:
        nonlocal count
        count += 1
        return count

    return bump


powers = [lambda x, i=i: x**i for i in range(4)]
first, second = lambda x: x + 1, lambda x: x + 2
long = lambda x, *rest, by=SCALE, **more: (  # noqa: E731
    x * by + sum(rest) + more.get("extra", 0)
)


def defaults(
    x: int,
    made: list[int] = [  # noqa: B006
        SCALE,
        len("ab"),  # noqa: B008
    ],
    *,
    key: int = SCALE + 1,
    plain: int = 5,
) -> list[int]:
    """Has defaults that are evaluated when it is made."""
    return [x, *made, key, plain]


def kept(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that keeps the name of what it decorates."""

    @functools.wraps(function)
    def inner(*args: Any) -> Any:
        return 10 * function(*args)

    return inner


def bare(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that does not."""

    def inner(*args: Any) -> Any:
        return 10 * function(*args)

    return inner


@kept
def decorated(x: int) -> int:
    """Decorated."""
    return x + 1


@bare
def wrapped(x: int) -> int:
    """Decorated."""
    return x + 1


@bare
@kept
def both(x: int) -> int:
    """Decorated twice, in two ways."""
    return x + 1


def plain(x: int) -> int:
    """Decorated below."""
    return x + 1


later = kept(plain)


@contextlib.contextmanager
def around(found: list[str]) -> Iterator[int]:
    """A context manager."""
    found.append("in")
    yield 5
    found.append("out")


@torch.no_grad()
def without_grad() -> bool:
    """Runs without gradients."""
    return torch.is_grad_enabled()


class Color(enum.Enum):
    """An enum."""

    RED = 1
    BLUE = "b"


@dataclass
class Config:
    """A dataclass."""

    width: int
    color: Color = Color.RED
    parts: list[Any] = field(default_factory=list)

    @property
    def double(self) -> int:
        """Uses itself and a name of the module."""
        return self.width * 2 * SCALE


class Base:
    """A class with a class of the module below it."""

    factor = 2

    def apply(self, x: int) -> int:
        """Uses an attribute of the class."""
        return x * self.factor

    @classmethod
    def make(cls) -> Base:
        """Makes one of itself."""
        return cls()


class Derived(Base):
    """Calls what it derives from, and names itself."""

    def apply(self, x: int) -> int:
        """Calls `super`."""
        assert isinstance(self, Derived)
        return super().apply(x) + SCALE


class Sae(nn.Module):
    """A module with parameters, buffers, tied weights and a method of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU())
        self.tied = self.inner[0]
        self.register_buffer("mean", torch.ones(width))
        self.names = ["a", "b"]
        self.config = Config(width)

    def forward(self, x: Tensor) -> Tensor:
        """Runs it."""
        return self.inner(x - self.mean) * SCALE + self.tied.bias.sum()


class Side(enum.Flag):
    """Has members that are several others."""

    LEFT = 1
    RIGHT = 2


@dataclass
class Table(dict[str, int]):
    """Holds items beside its fields."""

    width: int
    items_: dict[str, int]

    def __post_init__(self) -> None:
        self.update(self.items_)


@dataclass
class Refused(Exception):
    """Holds more than its fields say."""

    code: int


@dataclass
class Link:
    """May hold itself."""

    other: Any = None
