"""Stage 3: partitioned parameters, gathered around their uses.

The files, in the order of a parameter's life, which is the order in which to read them::

    made        partition_parameters.py     an ordinary parameter becomes a partitioned one; zero.Init
                partitioned_parameter.py    shard, full, view, and the states between them
    grouped     group_plan.py               which parameters are a group, and which groups share a bucket
                param_group.py              gathers and releases them together
                shard_reader.py             stages offloaded shards in
                available_parameters.py     new values for parameters that stay available over an update
                partitioned_model.py        a model: partition, plan, place, start
    used        module_hooks.py             report when an execution of a group begins and ends
                partitioned_param_coordinator.py
                                            lets groups gather and release in the order of the schedule
                fetch_schedule.py           decides which; fetch_plan.py precomputes it
    read        absent_parameter.py         p.shape, p.grad: the class of a parameter whose values are not here
                live_view.py                p.norm(), p.data: operations on released parameters gather them
                gathered_parameters.py      zero.GatheredParameters: full values for a block of code
"""
