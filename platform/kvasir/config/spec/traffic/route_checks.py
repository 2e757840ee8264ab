"""What is wrong with the routes of a deployment, each with the names to correct.

Names of routes form a graph that must end at models, so that every name that a client sends has an answer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from kvasir.config.spec.traffic.routes import RouteSpec


def routes_problem(
    routes: Sequence[RouteSpec],
    *,
    models: Collection[str],
    embedding: Collection[str],
    slos: Collection[str],
    tenants: Collection[str],
    slo_stated: bool,
) -> str | None:
    """Return what is wrong with the routes of a deployment, None for nothing. `models` are the names of
    models and adapters, `embedding` those among them that compute embeddings; `slo_stated`: the spec lists
    SLO classes."""
    names = [route.name for route in routes]
    if len(set(names)) != len(names):
        return f"routes: names must differ, found {names}; rename one"
    by_name = {route.name: route for route in routes}
    for route in routes:
        if route.name in models:
            return f"routes: {route.name!r} is the name of a model or adapter too; rename the route"
        if wrong := _unknown(route, models, by_name, slos, tenants):
            return f"routes: {route.name} {wrong}"
    if cycle := _cycle(by_name):
        return f"routes: {' → '.join(cycle)} is a cycle; let one of them name a model"
    for route in routes:
        if wrong := _misused(route, by_name, embedding, slo_stated=slo_stated):
            return f"routes: {route.name}: {wrong}"
    return None


def arm_of(name: str, routes: Mapping[str, RouteSpec]) -> str:
    """Return the model behind a name: of a route, its model, or its arm with the largest weight. The routes
    must have no cycle."""
    while name in routes:
        route = routes[name]
        name = route.model or max(route.arms, key=lambda arm: arm.weight).model
    return name


def _unknown(
    route: RouteSpec,
    models: Collection[str],
    routes: Collection[str],
    slos: Collection[str],
    tenants: Collection[str],
) -> str | None:
    alias = () if route.model is None else (route.model,)
    for field, names in (("model", alias), ("fallbacks", route.fallbacks)):
        for name in names:
            if name not in models and name not in routes:
                known = ", ".join((*models, *routes))
                return f"names unknown {name!r} in {field}; there are {known}; name one of them"
    for field, name in route.models():
        if name not in models:
            known = ", ".join(models)
            return f"names unknown model {name!r} in {field}; the models are {known}; name one of them"
    for rule in route.rules:
        if rule.slo is not None and rule.slo not in slos:
            known = ", ".join(slos)
            return f"names unknown SLO class {rule.slo!r} in rules; the classes are {known}; add it to slo"
        for tenant in rule.tenants:
            if tenant not in tenants:
                return f"names unknown tenant {tenant!r} in rules; correct the name or remove it"
    return None


def _cycle(routes: Mapping[str, RouteSpec]) -> list[str] | None:
    """Return the names of a cycle of aliases and fallbacks, the first name again at its end."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str] | None:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done or name not in routes:
            return None
        route = routes[name]
        for target in (*route.targets, *route.fallbacks):
            if found := visit(target, [*path, name]):
                return found
        done.add(name)
        return None

    return next((found for name in routes if (found := visit(name, []))), None)


def _misused(
    route: RouteSpec, routes: Mapping[str, RouteSpec], embedding: Collection[str], *, slo_stated: bool
) -> str | None:
    if route.canary is not None:
        if route.model in routes:
            return f"a canary is compared with a model, and {route.model!r} is a route; name its model"
        if route.canary.model == route.model:
            return f"the canary is the model {route.model!r} itself; name another model"
        if not slo_stated:
            return "a canary is judged by SLO classes, and the spec lists none; add slo"
    if route.model in routes and (route.rules or route.shadow is not None):
        return f"an alias of the route {route.model!r} has no rules and no shadow; move them to that route"
    used = {arm_of(name, routes) for name in (*route.targets, *route.fallbacks)}
    used |= {name for _, name in route.models()}
    if (len(used) > 1 or route.shadow is not None) and (vectors := used.intersection(embedding)):
        return (
            f"{', '.join(sorted(vectors))} computes embeddings, which differ between models; route it alone"
        )
    return None
