"""The example with a game of TextArena: the environment plays it, and a run trains (`make test-environments`)."""

from __future__ import annotations

import runpy
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from scripted_agents import with_tools

pytest.importorskip("textarena", reason="textarena is not installed: `make test-environments` installs it")


def win(game: Any) -> int:
    """Guesses by halves; the number of guesses."""
    low, high = 1, 20
    for guesses in range(1, 10):
        guess = (low + high) // 2
        said = game.play(f"[{guess}]")
        if said == "the game is over":
            return guesses
        low, high = (guess + 1, high) if "higher" in said else (low, guess - 1)
    raise AssertionError("it does not end")


def test_a_game_is_won_by_halving(from_examples: Any) -> None:
    game = from_examples("textarena_game").GuessTheNumber()
    assert "between 1 and 20" in game.reset(seed=7, prompt=[])
    assert game.get_reward() == 0.0
    assert "invalid move" in game.play("five")
    assert "You are playing" not in game.play("[1]")
    assert win(game) <= 5
    assert game.get_reward() == 1.0
    with pytest.raises(ValueError, match="over"):
        game.play("[5]")


def test_a_seed_is_a_number_whatever_begins_beside_it(from_examples: Any) -> None:
    make = from_examples("textarena_game").GuessTheNumber

    def guesses(seed: int) -> int:
        game = make()
        game.reset(seed=seed)
        return win(game)

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(guesses, [*range(1, 21)] * 3)) == [guesses(seed) for seed in range(1, 21)] * 3


def test_a_run(make_model: Any, make_tokenizer: Any, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    make_model(max_position_embeddings=2048).save_pretrained(tmp_path / "model")
    with_tools(make_tokenizer()).save_pretrained(tmp_path / "model")
    settings = ["max_steps=1", "max_completion_length=8", "use_cpu=true", "report_to=none"]
    script = Path(__file__).parents[2] / "examples" / "textarena_game.py"
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path / "model"), str(tmp_path / "run"), *settings])
    runpy.run_path(str(script), run_name="__main__")
    assert "done: 1 steps" in capsys.readouterr().out
