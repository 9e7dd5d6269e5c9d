"""Step traces made by hand, with sizes that can be added up in the head."""

from halfstep.plan.step_trace import BACKWARD, FORWARD, STEP, StepTrace, Storage


def storage(nbytes, component, born=0, died=None, module=None, phase=None):
    return Storage(nbytes, component, phase, None, module, None, None, born, died)


def trained(parameters, policy="bf16", activations=0, cast=0, temporaries=0, **more):
    """A step over ``parameters``: module to elements, in fp32 with Adam.

    Forward makes ``activations`` bytes and a cast, which the backward pass frees; the step makes ``temporaries``.
    """
    storages, time = [], 2
    for elements in parameters.values():
        storages += [storage(4 * elements, "weights")]
        storages += [storage(4 * elements, "optimizer states")] * 2
    end = 2 + len(parameters)
    storages.append(storage(activations, "activations", 1, end + 1))
    storages.append(storage(cast, "16-bit weights", 2, end + 2))
    for module, elements in parameters.items():
        time += 1
        storages.append(storage(4 * elements, "gradients", time, end + 5 + time, module, BACKWARD))
    storages.append(storage(temporaries, "step temporaries", end + 3, end + 4))
    num = sum(parameters.values())
    phases = ((FORWARD, 1), (BACKWARD, 3), (STEP, end + 3))
    settings = {"num_parameters": num, "num_trained": num, "batch_size": 1, "num_samples": 1, **more}
    return StepTrace(storages=storages, num_events=2 * end + 5, phases=phases, policy=policy, **settings)


def growing(fixed, growth, batch_size=4, num_samples=None, grows=True, **more):
    """A step of ``fixed`` bytes and ``growth`` bytes a sample."""
    return StepTrace(
        storages=[storage(fixed, "weights"), storage(growth * batch_size, "activations", 1, 2)],
        num_events=2,
        phases=((FORWARD, 1),),
        batch_size=batch_size,
        num_samples=batch_size if num_samples is None else num_samples,
        num_parameters=fixed // 4,
        num_trained=fixed // 4,
        growth=(0.0, float(growth)) if grows else None,
        **{"policy": "bf16", **more},
    )
