import { defineConfig } from "vite";

// Plain file names and no dates: the same sources give the same bytes, which `make dashboard` checks.
export default defineConfig({
  base: "./",
  build: {
    outDir: "../src/whet/app/dashboard/static",
    emptyOutDir: true,
    assetsInlineLimit: 0,
    cssCodeSplit: false,
    modulePreload: { polyfill: false },
    target: "es2022",
    rollupOptions: {
      output: { entryFileNames: "app.js", assetFileNames: "app.[ext]" },
    },
  },
});
