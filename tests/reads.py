"""Which fields of which dataclasses a source file reads, found by the types of what stands before the dot."""

import ast
import dataclasses
import typing

from jaxrl_llm.system.setting import annotations

SELF_CHECKS = ("check", "notes", "__post_init__")
"""Methods in which a setting only looks at itself."""


def fields_of(kind):
    return [field.name for field in dataclasses.fields(kind)]


def types_held(kinds, values):
    """Types of the dataclasses that fields of a name hold, by their annotations and in these values."""
    found = {}
    for kind in kinds:
        for name, (hint, _) in annotations(kind).items():
            found.setdefault(name, set()).update(one for one in (hint, *typing.get_args(hint)) if one in kinds)
    while values:
        named = [(name, getattr(value, name)) for value in values for name in fields_of(value)]
        items = [(name, one) for name, part in named for one in (part if isinstance(part, (tuple, list)) else (part,))]
        items = [(name, one) for name, one in items if dataclasses.is_dataclass(one) and not isinstance(one, type)]
        for name, one in items:
            found.setdefault(name, set()).add(type(one))
        values = [one for _, one in items]
    return found


class Reads(ast.NodeVisitor):
    """``found``: pairs of a type and a field that something reads.

    An expression's types are those of its variable, as the function annotates or assigns it, and else those that any
    configuration has in a field of the attribute's or the variable's name.
    """

    def __init__(self, kinds, held, trees):
        self.held = held
        self.found = set()
        self.scopes = [{}]
        self.own = {}
        self.named = {}
        for kind in kinds:
            for base in kind.__mro__[:-1]:
                self.named.setdefault(base.__name__, set()).add(kind)
        nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        for node in nodes:
            wanted = {line.target.id for line in node.body if isinstance(line, ast.AnnAssign)}
            wanted |= {line.name for line in node.body if isinstance(line, ast.FunctionDef) and line.decorator_list}
            if wanted and any("Protocol" in ast.unparse(base) for base in node.bases):
                self.named[node.name] = {kind for kind in kinds if wanted <= {*dir(kind), *fields_of(kind)}}
        for tree in trees:
            for line in tree.body:
                match line:
                    case ast.Assign([ast.Name(name)], ast.BinOp(_, ast.BitOr()) as union):  # of several types
                        self.named.setdefault(name, set()).update(self.annotated(union))
        for tree in trees:
            self.visit(tree)

    def types(self, node):
        match node:
            case ast.Name(name):
                scopes = [scope for scope in self.scopes if name in scope]
                return scopes[-1][name] if scopes else self.anywhere(name)
            case ast.Attribute(ast.Name("self"), name) if name in self.own:
                return self.own[name]
            case ast.Attribute(_, name):
                return self.anywhere(name)
            case ast.Subscript(value):
                return self.types(value)
            case ast.Call(ast.Attribute(_, "replace"), [value, *_]):
                return self.types(value)
            case ast.Call(ast.Name(name)):
                return self.named.get(name, set())
            case ast.IfExp(_, one, other):
                return self.types(one) | self.types(other)
            case ast.BoolOp(_, values):
                return set().union(*map(self.types, values))
        return set()

    def anywhere(self, name):
        return self.named["Configuration"] if name in ("run", "settings") else self.held.get(name, set())

    def annotated(self, note):
        names = [getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(note)]
        return set().union(*(self.named.get(name, set()) for name in names))

    def visit_ClassDef(self, node):
        outside = self.own
        lines = [line for line in node.body if isinstance(line, ast.AnnAssign)]
        self.own = {line.target.id: found for line in lines if (found := self.annotated(line.annotation))}
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                self.own |= self.kept(method)
        self.scopes.append({"self": self.named.get(node.name, set())})
        self.generic_visit(node)
        self.scopes.pop()
        self.own = outside

    def kept(self, method):
        """Types of the attributes that a constructor sets to its annotated arguments."""
        given = {one.arg: self.annotated(one.annotation) for one in method.args.args if one.annotation}
        pairs = []
        for line in ast.walk(method):
            match line:
                case ast.Assign([ast.Tuple(targets)], ast.Tuple(values)):
                    pairs += zip(targets, values, strict=True)
                case ast.Assign([target], value):
                    pairs.append((target, value))
        return {
            target.attr: given[value.id]
            for target, value in pairs
            if isinstance(target, ast.Attribute) and isinstance(value, ast.Name) and given.get(value.id)
        }

    def visit_FunctionDef(self, node):
        if node.name in SELF_CHECKS:
            return
        given = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        scope = {one.arg: found for one in given if one.annotation and (found := self.annotated(one.annotation))}
        self.scopes.append(scope)
        for inner in ast.walk(node):
            match inner:
                case ast.Assign([ast.Name(name)], value) | ast.For(ast.Name(name), value):
                    pass
                case ast.comprehension(ast.Name(name), value):
                    pass
                case _:
                    continue
            if found := self.types(value):
                scope[name] = scope.get(name, set()) | found
        self.generic_visit(node)
        self.scopes.pop()

    def visit_Attribute(self, node):
        self.found |= {(kind, node.attr) for kind in self.types(node.value)}
        self.generic_visit(node)

    def visit_Call(self, node):
        match node:
            case ast.Call(ast.Name("getattr"), [value, ast.Constant(name), *_]):
                self.found |= {(kind, name) for kind in self.types(value)}
        self.generic_visit(node)
