"""A game of TextArena as an environment: `python examples/textarena_game.py MODEL OUTPUT_DIR [key=value ...]`.

Needs `pip install textarena`. Another game of one player takes its name and, at most, another `play`.
"""

import sys
from threading import Lock

import textarena
import yaml
from datasets import Dataset

from groupgrad import GRPOConfig, GRPOTrainer

SEEDING = Lock()  # a game draws from Python's global stream when it begins, and rollouts begin side by side


class GuessTheNumber:
    def reset(self, seed: int, **row) -> str:
        self._game, self._read, self._is_over = textarena.make("GuessTheNumber-v0"), 0, False
        with SEEDING:
            self._game.reset(num_players=1, seed=seed)
        return self._news()

    def play(self, move: str) -> str:
        """Make a move.

        Args:
            move: A number in square brackets, such as "[5]".
        """
        if self._is_over:
            raise ValueError("the game is over")
        self._is_over, _ = self._game.step(move)
        return "the game is over" if self._is_over else self._news()

    def get_reward(self) -> float:
        return float(self._game.close()[0][0]) if self._is_over else 0.0

    def _news(self) -> str:
        observation = self._game.get_observation()[1]  # everything said in the game so far
        self._read, news = len(observation), observation[self._read :]
        return news


if __name__ == "__main__":
    model, output_dir, *settings = sys.argv[1:]
    options = {key: yaml.safe_load(value) for key, value in (text.split("=", 1) for text in settings)}
    rows = [{"prompt": [{"role": "user", "content": "Play with the tool."}], "seed": seed} for seed in range(1, 201)]
    args = GRPOConfig(output_dir=output_dir, **{"max_completion_length": 1024, **options})
    GRPOTrainer(model, args=args, environment_factory=GuessTheNumber, train_dataset=Dataset.from_list(rows)).train()
