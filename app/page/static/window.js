// The window: focus, printing and the first display.

// Another tab may have loaded another model.
window.addEventListener("focus", () => trigger("focus"));

// Prints the whole chat. A style element of its own, because Gradio limits media rules in its CSS to
// elements inside its frame.
const onPaper = document.createElement("style");
onPaper.textContent = `@media print {
  html, body, gradio-app, .gradio-container, .main, .sidebar-parent, main.contain, .contain > .column,
  #transcript, #transcript .html-container, #transcript .html-container > div, .turns {
    display: block !important; height: auto !important; min-height: 0 !important;
    overflow: visible !important; padding-left: 0 !important;
  }
  #settings, #entry, #top button, .actions, .unsaved, .refused { display: none !important; }
  #transcript .said { max-height: none !important; border: 1px solid var(--line); }
  #transcript .user { break-after: avoid; }
}`;
document.head.append(onPaper);

// The dark theme's light text would be pale on paper.
let isDark = false;
window.addEventListener("beforeprint", () => {
  isDark = document.body.classList.contains("dark");
  document.body.classList.remove("dark");
});
window.addEventListener("afterprint", () => document.body.classList.toggle("dark", isDark));

watch("value", show);
show();
