"""A run that looks after itself: what the engine tells is kept, judged, acted on, told to people, and shown.

    log          JSON lines, one file a rank, written by the training process       entry says what is in a line
    guard        rules over the last 100 steps, in the training process             window, rule, rules/, golden
    check        the same rules over a finished run
    notify       an alert to people, over apprise, a webhook or a command
    exporters/   the same lines to TensorBoard, Weights & Biases, MLflow, Prometheus
    store        an SQLite index of the lines with extremes kept at every zoom: index, intake, pyramid, metrics, layers
    server       a live page of a folder of runs (runs, shelf, api, routes, access, assets, static/); terminal its twin

Nothing here imports torch.
"""
