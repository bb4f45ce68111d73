"""Answering many requests on one model: an engine that computes tokens, and HTTP in front of it.

The way of a request: `http/app.py` parses it -> `http/dispatcher.Hub` -> `engine_process.ApartEngine`, a pipe -> in the
engine's process `engine_server.EngineServer` -> `continuous.ContinuousEngine`, one thread: `scheduler.Scheduler.plan` chooses
the rows of a pass, `model_runner.ModelRunner` computes it and samples in it (`sampler.Special` after it, for requests that need
more than a temperature), `draft_rounds.DraftRounds` where drafts are checked -> `request.Event`s -> the pipe -> `Hub` ->
`http/reply.py`.
"""
