"""Train PPO on CartPole with Stable-Baselines3, while a worker plays with each published policy.

Observations are normalised by statistics that change while PPO trains, so they are published, too.

python examples/stable_baselines3_trainer.py --steps 20000
"""

import argparse
import threading

import gymnasium
from stable_baselines3 import PPO
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

import weightbus
from weightbus.python_client.training.stable_baselines3 import PublishWeights, target


def environment(*, training: bool) -> VecNormalize:
    """Return an environment that normalises; only the trainer's environment updates statistics."""
    return VecNormalize(
        DummyVecEnv([lambda: gymnasium.make("CartPole-v1")]),
        training=training,
        norm_reward=training,
    )


def play(address: str, over: threading.Event) -> None:
    """Play five episodes with every version that arrives. (Usually this is another process.)"""
    played = environment(training=False)
    player = PPO("MlpPolicy", played, device="cpu")
    with weightbus.Subscriber(address, {"policy": target(player)}) as worker:
        while not over.is_set():
            update = worker.receive(timeout=1.0)
            if update is not None:
                mean, _ = evaluate_policy(player, played, 5, warn=False)
                print(f"version {update.version}: mean reward {mean}", flush=True)


def main() -> None:
    """Train, while another thread plays."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    over = threading.Event()
    with weightbus.Publisher() as publisher:
        playing = threading.Thread(target=play, args=(publisher.address, over))
        playing.start()
        publisher.wait_for_workers(1, timeout=60)
        trainer = PPO("MlpPolicy", environment(training=True), n_steps=512, device="cpu")
        trainer.learn(parser.parse_args().steps, callback=PublishWeights(publisher))
        over.set()
        playing.join()


if __name__ == "__main__":
    main()
