"""Work for a GPU that needs none: train a small network on handwritten digits, and evaluate larger models.

Both are ordinary functions that report their progress. The training also saves a checkpoint after each epoch:
it can be stopped at any time, and resumes to exactly the same result.
"""

import time
from collections.abc import Iterator
from typing import Any

from gpubroker import Stopped, current_task
from sklearn.datasets import load_digits
from sklearn.model_selection import cross_val_score
from sklearn.neural_network import MLPClassifier
from sklearn.svm import SVC

TRAINING_ROWS = 1400


def train(seed: int, hidden: int, epochs: int, pace_seconds: float = 0.0) -> dict[str, Any]:
    """Train in as many attempts as necessary. `pace_seconds` is a pause after each epoch, for those who watch
    it."""
    task = current_task()
    model, done = task.resume_state or (new_model(seed, hidden), 0)
    resumed_at = done

    for _ in learn(model, epochs - done):
        done += 1
        task.progress(done / epochs, f"epoch {done} of {epochs}")
        task.checkpoint((model, done))
        if task.should_stop:
            raise Stopped
        time.sleep(pace_seconds)

    return {"accuracy": accuracy(model), "resumed_at_epoch": resumed_at, "attempt": task.attempt}


def new_model(seed: int, hidden: int) -> MLPClassifier:
    return MLPClassifier((hidden,), learning_rate_init=0.002, batch_size=64, random_state=seed)


def learn(model: MLPClassifier, epochs: int) -> Iterator[None]:
    """Train the model for one epoch at each step. The model includes its random state and its optimizer's."""
    images, labels = load_digits(return_X_y=True)
    for _ in range(epochs):
        model.partial_fit(images[:TRAINING_ROWS] / 16, labels[:TRAINING_ROWS], classes=range(10))
        yield


def accuracy(model: MLPClassifier) -> float:
    """Return the share of the test rows that the model labels correctly."""
    images, labels = load_digits(return_X_y=True)
    return float(model.score(images[TRAINING_ROWS:] / 16, labels[TRAINING_ROWS:]))


def evaluate(folds: int) -> dict[str, Any]:
    """Evaluate support vector machines by cross-validation; returns the accuracy of the best."""
    task = current_task()
    candidates = (0.3, 1.0, 3.0, 10.0)
    scores = {}
    for number, strictness in enumerate(candidates, start=1):
        scores[str(strictness)] = score(strictness, folds)
        task.progress(number / len(candidates), f"model {number} of {len(candidates)}")
    return {"accuracy": max(scores.values()), "scores": scores}


def score(strictness: float, folds: int) -> float:
    images, labels = load_digits(return_X_y=True)
    return float(cross_val_score(SVC(C=strictness), images / 16, labels, cv=folds).mean())
