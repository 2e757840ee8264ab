import { fileURLToPath } from "node:url";
import { defineConfig, type Plugin } from "vite";
import { digest } from "./sources.ts";

const ROOT = fileURLToPath(new URL(".", import.meta.url));

function recordSources(): Plugin {
  return {
    name: "record-sources",
    generateBundle() {
      const source = `${JSON.stringify({ sources: digest(ROOT) })}\n`;
      this.emitFile({ type: "asset", fileName: "build.json", source });
    },
  };
}

// Relative addresses, so that a proxy may serve the console below any path. Names without digests: entity
// tags tell browsers when a file has changed.
export default defineConfig({
  base: "./",
  plugins: [recordSources()],
  build: {
    target: "es2022",
    assetsDir: "",
    assetsInlineLimit: 0,
    modulePreload: false,
    emptyOutDir: true,
    license: { fileName: "licenses.txt" }, // of what is bundled, which ships with its copies
    rollupOptions: {
      output: {
        entryFileNames: "console.js",
        chunkFileNames: "[name].js",
        assetFileNames: (asset) => (asset.names[0]?.endsWith(".css") ? "console.css" : "[name][extname]"),
      },
    },
  },
});
