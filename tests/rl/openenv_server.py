"""An OpenEnv server, run by the interpreter that has the package: `python openenv_server.py PORT`."""

import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Say(Action):
    message: str


class Heard(Observation):
    text: str


class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.seed, self.heard = seed, []
        return Heard(text=f"{seed}{kwargs.get('sign', '')}", done=False, reward=0.0)

    def step(self, action, timeout_s=None, **kwargs):
        self.heard.append(action.message)
        return Heard(text=f"{action.message}!", done=len(self.heard) == 2, reward=float(len(self.heard)))

    @property
    def state(self):
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Echo, Say, Heard, max_concurrent_envs=8)
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
