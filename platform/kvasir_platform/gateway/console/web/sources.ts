// The digest of everything that the build is made of, by which a test sees that the committed build is
// one of the committed sources.

import { createHash } from "node:crypto";
import { readdirSync, readFileSync, statSync } from "node:fs";
import { join } from "node:path";

const SKIPPED = new Set(["node_modules", "dist", ".installed"]); // what building adds

/** Paths of all files below a folder, relative to it, in the order of their bytes. */
export function files(root: string, below = ""): string[] {
  const found: string[] = [];
  for (const name of readdirSync(join(root, below))) {
    if (SKIPPED.has(name)) continue;
    const path = below === "" ? name : `${below}/${name}`;
    if (statSync(join(root, path)).isDirectory()) found.push(...files(root, path));
    else found.push(path);
  }
  return found.sort((a, b) => Buffer.compare(Buffer.from(a), Buffer.from(b)));
}

/** SHA-256 over path, size and content of each file. */
export function digest(root: string): string {
  const hash = createHash("sha256");
  for (const path of files(root)) {
    const content = readFileSync(join(root, path));
    hash.update(`${path}\n${content.length}\n`);
    hash.update(content);
  }
  return hash.digest("hex");
}
