"""For the tests of pages: figures of the same data are drawn once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from hapi.figures import html


@pytest.fixture(scope="session")
def drawn() -> dict[tuple[str, str], str]:
    """Figures by their function and its arguments."""
    return {}


@pytest.fixture(scope="module", autouse=True)
def drawn_once(drawn: dict[tuple[str, str], str]) -> Iterator[None]:
    """A page has five figures, and most tests change what one of them shows."""

    def once(name: str, draw: Callable[..., str]) -> Callable[..., str]:
        def remembered(*data: object) -> str:
            if (key := (name, repr(data))) not in drawn:
                drawn[key] = draw(*data)
            return drawn[key]

        return remembered

    with pytest.MonkeyPatch.context() as patch:
        for name in ("epochs_svg", "layers_svg", "learning_svg", "stages_svg", "timeline_svg"):
            patch.setattr(html, name, once(name, getattr(html, name)))
        yield
